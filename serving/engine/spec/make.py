"""The drafter that a configuration asks for, where it needs no weights (those that do are in `ahead.py`)."""

from __future__ import annotations

from pagoda.serving.engine.spec.config import Mtp, Ngram, Speculation
from pagoda.serving.engine.spec.drafter import Drafter, PromptLookup


def make_drafter(speculation: Ngram | None) -> Drafter | None:
    """None where nothing is drafted."""
    match speculation:
        case Ngram(count, longest, shortest):
            return PromptLookup(count, longest, shortest)
        case None:
            return None


def taps_of(speculation: Speculation | None, layers: int) -> tuple[int, ...]:
    """Which of a model's layers have their states read by the drafter."""
    return (layers - 1,) if isinstance(speculation, Mtp) else ()
