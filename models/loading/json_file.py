"""A JSON file of a checkpoint, with an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError


def read_json(path: Path) -> Any:
    """What it holds. Raises `CheckpointError` for a file that is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; fetch the model again") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch it again") from error


def _number(values: dict[str, Any]) -> Any:
    """transformers writes numbers that JSON lacks as {"__float__": "Infinity"}."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values
