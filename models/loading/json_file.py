"""JSON of a checkpoint, with errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError


def read_json(path: Path) -> Any:
    """What a file holds. Raises `CheckpointError` for one that is missing or damaged."""
    try:
        return parsed(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; fetch the model again") from None


def parsed(text: bytes, what: str) -> Any:
    """The value of a text; `what` it is, for the `CheckpointError` where it is none."""
    try:
        return json.loads(text, object_hook=_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}; fetch it again") from None


def _number(values: dict[str, Any]) -> Any:
    """transformers writes numbers that JSON lacks as {"__float__": "Infinity"}."""
    named = values.get("__float__") if len(values) == 1 else None
    return float(named) if isinstance(named, str) else values
