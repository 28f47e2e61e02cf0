"""Structured outputs in the scheduler: a matcher follows each sequence's tokens and says which may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import BoolArray, IntArray


class Matcher(Protocol):
    """One sequence's place in its grammar."""

    def accept(self, tokens: list[int]) -> None:
        """Tokens that were sampled, in order; those after the grammar's end are ignored."""
        ...

    def fill(self, row: IntArray) -> None:
        """Write which tokens may follow: `[ceil(V/32)]` int32, bit i of word w is token 32w + i. At the end only stop tokens may."""
        ...


Grammar = Callable[[], Matcher]
"""A compiled grammar: makes matchers at its beginning."""

Compiler = Callable[[tuple[str, Any]], Grammar]
"""From `SamplingParams.structured` to a grammar; called in a thread of its own. Raises `RequestError` for what is none."""


def masks(ledger: Ledger, slots: IntArray, sampled: BoolArray, vocab: int) -> tuple[IntArray, IntArray] | tuple[None, None]:
    """Rows of a plan that sample under a grammar, and their bitmasks; two Nones where there is no such row.

    Such rows are bound: all their tokens are known when the next one is planned.
    """
    candidates = np.flatnonzero(ledger.slots.bound[slots] & sampled)
    rows = [row for row in candidates.tolist() if ledger.slots.sequence(int(slots[row])).request.grammar is not None]
    if not rows:
        return None, None
    out = np.zeros((len(rows), (vocab + 31) // 32), np.int32)
    for mask, row in zip(out, rows, strict=True):
        _fill(ledger, int(slots[row]), mask)
    return np.array(rows, np.int32), out


def _fill(ledger: Ledger, slot: int, mask: IntArray) -> None:
    sequence, state = ledger.slots.sequence(slot), ledger.slots
    if sequence.matcher is None:
        assert sequence.request.grammar is not None
        sequence.matcher = sequence.request.grammar()
    begun = len(sequence.request.source.prompt) + sequence.matched
    tokens = state.tokens[slot, begun : int(state.known[slot])].tolist()
    sequence.matcher.accept(tokens)
    sequence.matched += len(tokens)
    sequence.matcher.fill(mask)
