"""`--config FILE.yaml`: options in a file, read as the command-line words they stand for."""

from __future__ import annotations

import json
from typing import Any

import yaml
from pagoda.hal.errors import ConfigError


def spelled(name: str) -> str:
    """The flag of a field: "max_model_len" → "--max-model-len"."""
    return "--" + name.replace("_", "-")


def arguments_of_file(path: str) -> list[str]:
    """The options in a YAML file as command-line words. Raises `ConfigError` for a file that is none."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map flags to values, such as `max-model-len: 4096`")
    return [word for name, value in content.items() for word in _words(spelled(str(name)), value)]


def _words(flag: str, value: Any) -> list[str]:
    match value:
        case True:
            return [flag]
        case False:
            return [f"--no-{flag[2:]}"]
        case None:
            return []
        case list():
            return [word for item in value for word in _words(flag, item)]
        case dict():
            return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]
