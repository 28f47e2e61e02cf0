"""The drafter that a configuration asks for."""

from __future__ import annotations

from pagoda.serving.engine.spec.config import Ngram, Speculation
from pagoda.serving.engine.spec.drafter import Drafter, PromptLookup


def make_drafter(speculation: Speculation | None) -> Drafter | None:
    """None where nothing is drafted."""
    match speculation:
        case Ngram(count, longest, shortest):
            return PromptLookup(count, longest, shortest)
        case None:
            return None
