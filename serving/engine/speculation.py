"""Speculation in the scheduler: rows whose tokens are all known also get drafts, and keep what the ranks accepted.

What a grammar forces is drafted too: it is verified like a guess, so that no token, logprob or penalty can differ from a plain run's, and
is as good as always right, since the sampler may choose but among ways to write the same text.
"""

from __future__ import annotations

import numpy as np
from pagoda.serving.engine.grammar import MaskFiller, matcher_of
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import BoolArray, IntArray, LongArray, StepPlan, StepResult
from pagoda.serving.engine.spec.config import MOST_DRAFTS
from pagoda.serving.engine.spec.drafter import Draft, Drafter, DraftState, TokenStates


class Speculator:
    """Drafts, chains and trees, lie in `Slots.tokens` after the known ones until the step's result replaces them; rows are bound.

    Args:
        drafter: guesses for all rows; None: rows that follow a grammar alone have drafts, of what that forces.
        masks: of the step that is planned.
    """

    def __init__(self, ledger: Ledger, drafter: Drafter | None, masks: MaskFiller) -> None:
        self._ledger, self._masks = ledger, masks
        self._drafter = drafter
        self._draft = Draft(np.empty((0, 0), np.int32), np.empty((0, 0), np.int32))
        self._place: IntArray = np.zeros(ledger.slots.count, np.int32)
        ledger.slots.drafting = drafter is not None
        self.taps = drafter.wants if drafter is not None else ()
        self._states: dict[int, TokenStates] = {}
        self._reached: IntArray = np.zeros(ledger.slots.count, np.int32)  # where each slot's states end

    def tapped(self, slots: IntArray) -> BoolArray | None:
        """`StepPlan.tapped` of a step of these rows."""
        return ~self._ledger.slots.searching[slots] if self.taps else None

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the states that a step gave until the drafter is asked about their sequence."""
        for admission in plan.admissions:
            self._states.pop(admission.slot, None)
            self._reached[admission.slot] = 0
        for row, states in result.hidden.items():
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            old = self._states.get(slot)
            if old is not None and old.start <= start <= old.start + old.states.shape[1]:
                start, states = old.start, np.concatenate([old.states[:, : start - old.start], states], axis=1)
            self._states[slot] = TokenStates(start, states)
            self._reached[slot] = start + states.shape[1]

    def may_draft(self, slots: IntArray) -> bool:
        """Whether any of these rows can have drafts at all."""
        return self._drafter is not None or bool(self._ledger.slots.follows[slots].any())

    def draft(self, slots: IntArray, counts: IntArray, budget: int) -> IntArray:
        """Tokens that each of these rows gets beside its `counts`, `budget` in all; also kept as `Slots.drafted`."""
        state = self._ledger.slots
        extra, rows = np.zeros(len(slots), np.int32), self._rows(slots, counts)
        if len(rows):
            chosen = slots[rows]
            known = state.known[chosen]
            room = np.clip(state.limit[chosen] - known - 1, 0, budget).astype(np.int32)
            self._draft = with_forced(self._guesses(chosen, known, room), self._forced(chosen, room))
            self._place[chosen] = np.arange(len(chosen))
            extra[rows] = np.minimum((self._draft.ids >= 0).sum(1), room)
            if self._drafter is None and extra.sum() < len(slots):
                extra[:] = 0  # a step with drafts runs as it is, not as a captured one: it has to save a step for each of its rows
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
        most = int(drafted.max())
        offsets = np.arange(most, dtype=np.int32)
        there = offsets < drafted[:, None]
        places = np.minimum(state.known[slots, None] + offsets, state.tokens.shape[1] - 1)
        parents = np.where(there, self._draft.parents[np.where(drafted > 0, self._place[slots], 0), :most], -1).astype(np.int32)
        return np.where(there, state.tokens[slots[:, None], places], -1).astype(np.int32), parents

    def _guesses(self, chosen: IntArray, known: IntArray, room: IntArray) -> Draft:
        if self._drafter is None:
            nothing = np.empty((len(chosen), 0), np.int32)
            return Draft(nothing, nothing)
        tokens = [self._ledger.slots.tokens[slot, :count] for slot, count in zip(chosen.tolist(), known.tolist(), strict=True)]
        return self._drafter.propose(DraftState(chosen, tokens, room, self._take_states(chosen)))

    def _forced(self, chosen: IntArray, room: IntArray) -> dict[int, list[int]]:
        """Of each row whose grammar leaves no choice, the tokens that must come."""
        state = self._ledger.slots
        found: dict[int, list[int]] = {}
        state.jumped[chosen] = False
        rows = np.flatnonzero(state.follows[chosen] & (room > 0))
        if not len(rows):
            return found
        for row in rows[self._masks.begin(self._ledger, chosen[rows])].tolist():
            slot = int(chosen[row])
            if forced := matcher_of(self._ledger, slot).forced()[: min(int(room[row]), MOST_DRAFTS)]:
                found[row] = forced
                state.jumped[slot] = True
        return found

    def _take_states(self, slots: IntArray) -> tuple[TokenStates | None, ...]:
        return tuple(self._states.pop(slot, None) for slot in slots.tolist()) if self.taps else ()

    def _rows(self, slots: IntArray, counts: IntArray) -> LongArray:
        state = self._ledger.slots
        known = state.total[slots] == state.known[slots]
        if self._drafter is None:
            known &= state.follows[slots]
        if self.taps:  # with states up to the newest token, whose own come with this step
            known &= self._reached[slots] >= state.known[slots] - 1
        if (
            states := self._ledger.states
        ) is not None:  # not while what was accepted is computed again: that would grow with each rejection
            known &= (counts == 1) & (states.pages[slots, 0] > 0)
        return np.flatnonzero(known & (counts == state.total[slots] - state.computed[slots]) & ~state.searching[slots])

    def _write(self, slots: IntArray, known: IntArray, counts: IntArray) -> None:
        for row, (slot, start, count) in enumerate(zip(slots.tolist(), known.tolist(), counts.tolist(), strict=True)):
            self._ledger.slots.tokens[slot, start : start + count] = self._draft.ids[row, :count]


def with_forced(draft: Draft, forced: dict[int, list[int]]) -> Draft:
    """The same with what is forced in place of guesses."""
    if not forced:
        return draft
    rows, width = len(draft.ids), max(draft.ids.shape[1], *map(len, forced.values()))
    ids, parents = np.full((rows, width), -1, np.int32), np.full((rows, width), -1, np.int32)
    ids[:, : draft.ids.shape[1]], parents[:, : draft.ids.shape[1]] = draft.ids, draft.parents
    for row, tokens in forced.items():
        ids[row], parents[row] = -1, np.arange(-1, width - 1)
        ids[row, : len(tokens)] = tokens
    return Draft(ids, parents)


def take_accepted(ledger: Ledger, slots: IntArray, rows: IntArray, bound: BoolArray, result: StepResult) -> list[tuple[int, ...]]:
    """Append what the ranks accepted and sampled, up to an end; counts become exact again. Returns each row's tokens. `bound`: `[R]`, the
    plan's.

    Accepted drafts of another branch than the first are known now, but their K and V lie elsewhere: the row is behind by them. A recurrent
    state is of all drafts or of none: where one was rejected, the row is behind by the whole step.
    """
    state, kept = ledger.slots, []
    in_place = result.counts - 1 if result.in_place is None else result.in_place
    for slot, row, alone in zip(slots.tolist(), rows.tolist(), bound.tolist(), strict=True):
        known = int(state.known[slot])
        tokens = result.tokens[row, : result.counts[row]]
        lengths = known + 1 + np.arange(len(tokens))
        ends = np.isin(tokens, state.stops[slot]) & (lengths >= state.floor[slot]) | (lengths >= state.limit[slot])
        tokens = tokens[: int(np.argmax(ends)) + 1] if ends.any() else tokens
        state.tokens[slot, known : known + len(tokens)] = tokens
        there = min(known + int(in_place[row]), known + len(tokens) - 1)
        known += len(tokens)
        state.known[slot] = known
        if alone:  # others have no drafts, and may be in the next steps already
            if ledger.states is not None and (before := ledger.states.verified(slot, there == state.computed[slot])) is not None:
                there = before
            state.total[slot], state.computed[slot], state.committed[slot] = known, there, there
        kept.append(tuple(tokens.tolist()))
    return kept
