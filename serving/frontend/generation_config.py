"""A checkpoint's own sampling settings, from generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError

_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} | {"max_new_tokens": "max_tokens"}


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """`SamplingParams` fields that the checkpoint states; {} where it has no such file. `do_sample: false` alone means nothing."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; download it again") from error
    return {ours: config[theirs] for theirs, ours in _NAMES.items() if config.get(theirs) is not None}
