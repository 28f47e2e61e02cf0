"""Speculation in the scheduler: rows that are behind by one token also get drafts, and keep what the ranks accepted."""

from __future__ import annotations

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import IntArray, LongArray, StepResult
from pagoda.serving.engine.spec.drafter import Draft, Drafter, DraftState


class Speculator:
    """Chains of drafts. They lie in `Slots.tokens` after the known ones until the step's result replaces them; rows are bound."""

    def __init__(self, ledger: Ledger, drafter: Drafter) -> None:
        self._ledger = ledger
        self._drafter = drafter
        self._draft = Draft(np.empty((0, 0), np.int32), np.empty((0, 0), np.int32))
        ledger.slots.drafting = True

    def draft(self, slots: IntArray, counts: IntArray, budget: int) -> IntArray:
        """Tokens that each of these rows gets beside its `counts`, `budget` in all; also kept as `Slots.drafted`."""
        state = self._ledger.slots
        extra, rows = np.zeros(len(slots), np.int32), self._rows(slots, counts)
        if len(rows):
            chosen = slots[rows]
            known = state.known[chosen]
            room = np.minimum(state.limit[chosen] - known - 1, budget).astype(np.int32)
            tokens = [state.tokens[slot, :count] for slot, count in zip(chosen.tolist(), known.tolist(), strict=True)]
            self._draft = self._drafter.propose(DraftState(chosen, tokens, room))
            extra[rows] = (self._draft.ids >= 0).sum(1)
            over = np.cumsum(extra) - budget
            extra = np.clip(extra - np.maximum(over, 0), 0, extra).astype(np.int32)
            self._write(chosen, known, extra[rows])
        state.drafted[slots] = extra
        return extra

    def columns(self, slots: IntArray) -> tuple[IntArray, IntArray] | None:
        """`StepPlan.drafts` and `parents` of a step of these rows, None where it has no drafts."""
        state = self._ledger.slots
        drafted = state.drafted[slots]
        if not drafted.any():
            return None
        offsets = np.arange(drafted.max(), dtype=np.int32)
        there = offsets < drafted[:, None]
        places = np.minimum(state.known[slots, None] + offsets, state.tokens.shape[1] - 1)
        parents = np.where(there, offsets - 1, -1).astype(np.int32)
        return np.where(there, state.tokens[slots[:, None], places], -1).astype(np.int32), parents

    def _rows(self, slots: IntArray, counts: IntArray) -> LongArray:
        state = self._ledger.slots
        decodes = (counts == 1) & (state.total[slots] == state.known[slots]) & (state.computed[slots] == state.known[slots] - 1)
        return np.flatnonzero(decodes & ~state.searching[slots] & (state.known[slots] >= state.prompt[slots] + 1))

    def _write(self, slots: IntArray, known: IntArray, counts: IntArray) -> None:
        for row, (slot, start, count) in enumerate(zip(slots.tolist(), known.tolist(), counts.tolist(), strict=True)):
            self._ledger.slots.tokens[slot, start : start + count] = self._draft.ids[row, :count]


def take_accepted(ledger: Ledger, slots: IntArray, rows: IntArray, result: StepResult) -> list[tuple[int, ...]]:
    """Append what the ranks accepted and sampled, up to an end; counts become exact again. Returns each row's tokens."""
    state, kept = ledger.slots, []
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        known = int(state.known[slot])
        tokens = result.tokens[row, : result.counts[row]]
        lengths = known + 1 + np.arange(len(tokens))
        ends = np.isin(tokens, state.stops[slot]) & (lengths >= state.floor[slot]) | (lengths >= state.limit[slot])
        tokens = tokens[: int(np.argmax(ends)) + 1] if ends.any() else tokens
        state.tokens[slot, known : known + len(tokens)] = tokens
        known += len(tokens)
        state.known[slot] = state.total[slot] = known
        state.computed[slot] = state.committed[slot] = known - 1
        kept.append(tuple(tokens.tolist()))
    return kept
