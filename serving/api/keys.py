"""The server's API keys, from the command line, a file and the environment, and the check of the one that a request brings."""

from __future__ import annotations

import hashlib
import hmac
import os
from contextvars import ContextVar
from pathlib import Path

from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.errors import AuthenticationError

CLIENT: ContextVar[str] = ContextVar("pagoda.client", default="")
"""Whose request a task works for: the name of the key that it came with; empty on servers without keys, where all are the same client."""


def keys_of(config: ServerConfig) -> tuple[str, ...]:
    """All keys. Raises `ConfigError` where some were announced and none is there."""
    return (*config.api_key, *_keys_of_file(config.api_key_file), *_keys_of_variable(config.api_key_env))


class KeyRing:
    """Knows keys again without keeping them, and compares without telling by time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def name_of(self, authorization: bytes, x_api_key: bytes) -> str | None:
        """The digest of the key in these two headers, which is its client's name; None: it is none of the keys."""
        scheme, _, token = authorization.partition(b" ")
        digest = _digest(token.strip() if scheme.lower() == b"bearer" else x_api_key)
        known = sum(hmac.compare_digest(digest, one) for one in self._digests)
        return digest.hex() if known else None


def missing_key() -> AuthenticationError:
    """What a request without one of the keys is refused with."""
    return AuthenticationError("a valid API key is missing; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
