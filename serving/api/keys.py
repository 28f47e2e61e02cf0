"""The server's API keys, from the command line, a file and the environment."""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig


def keys_of(config: ServerConfig) -> tuple[str, ...]:
    """All keys. Raises `ConfigError` where some were announced and none is there."""
    return (*config.api_key, *_keys_of_file(config.api_key_file), *_keys_of_variable(config.api_key_env))


def _keys_of_file(path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from error
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key: write one a line")
    return keys


def _keys_of_variable(name: str | None) -> list[str]:
    if name is None:
        return []
    keys = [key.strip() for key in os.environ.get(name, "").split(",") if key.strip()]
    if not keys:
        raise ConfigError(f"--api-key-env {name}: this environment variable is not set or empty")
    return keys
