"""A checkpoint's own sampling settings, from generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError, ConfigError

_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {"max_new_tokens": "max_tokens"}
_PEER = {ours: theirs for theirs, ours in _NAMES.items()}


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """`SamplingParams` fields that the checkpoint states; {} where it has no such file. `do_sample: false` alone means nothing."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from error
    return _settings(config)


def server_defaults(checkpoint: Path, where: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a server's requests start from. `where` is "auto", "none" (or "vllm", the peer's word for it), or a folder.

    Raises `ConfigError` for a folder without the file and for settings of `overrides` that are none.
    """
    unknown = sorted(set(overrides) - set(_NAMES) - set(_NAMES.values()))
    if unknown:
        raise ConfigError(f"--override-generation-config has no setting {unknown[0]!r}; there are {', '.join(_NAMES)}")
    if where not in ("auto", "none", "vllm") and not (Path(where) / "generation_config.json").is_file():
        raise ConfigError(f"--generation-config {where}: there is no generation_config.json in it; give a folder, auto or none")
    base = {} if where in ("none", "vllm") else sampling_defaults(checkpoint if where == "auto" else Path(where))
    return base | _settings({_PEER.get(name, name): value for name, value in overrides.items()})


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: config[theirs] for theirs, ours in _NAMES.items() if config.get(theirs) is not None}
