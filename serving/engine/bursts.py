"""Bursts: decode steps planned several at once, which the ranks run one after the other while the host has nothing to say in between."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import BoolArray, IntArray, RunnerFacts
from pagoda.serving.engine.sequence import State
from pagoda.serving.engine.slots import Slots

BURST_MS = 5.0
"""A burst takes no longer, by the pace of the last steps: a request that arrives waits for the two that may be in flight."""


class BurstRule:
    """Decides how many steps are planned at once.

    Attributes:
        step_ms: how long a step takes, as far as that is known.
    """

    def __init__(self, ledger: Ledger, facts: RunnerFacts) -> None:
        # States of recurrent layers, and lengths that make a sequence begin anew, want the host between steps.
        alone = ledger.states is None and ledger.epochs is None and facts.pooling is None
        self._ledger = ledger
        self._most, self._rows = facts.burst_steps if alone else 1, facts.burst_rows
        self.step_ms = 0.0

    def runs(self, chosen: IntArray, counts: IntArray) -> IntArray | None:
        """`StepPlan.runs` of a step that gives these slots so many tokens; None where it should be a single one."""
        ledger, slots = self._ledger, self._ledger.slots
        most = min(self._most, int(BURST_MS / self.step_ms)) if self.step_ms else self._most
        if most < 2 or not 0 < len(chosen) <= self._rows or self._somebody_waits(len(chosen)):
            return None
        left = np.minimum(slots.limit[chosen], slots.turn[chosen]) - slots.total[chosen]
        decodes = (counts == 1) & (slots.total[chosen] - slots.computed[chosen] == 1)
        if not (decodes & slots.bursts[chosen]).all() or left.max() < 2:
            return None
        runs: IntArray = np.minimum(left, most).astype(np.int32)
        needs = ledger.tables.need(chosen, slots.computed[chosen] + runs)
        return runs if needs.sum() <= ledger.pool.available else None

    def _somebody_waits(self, chosen: int) -> bool:
        ledger, slots = self._ledger, self._ledger.slots
        if ledger.spawning or ledger.loading or ledger.waiting.peek() is not None:
            return True
        unfinished = slots.total[ledger.order] < slots.limit[ledger.order]
        return chosen < int(unfinished.sum()) or any(left.state is State.PREEMPTING for left in ledger.draining)


class Taken(NamedTuple):
    """What rows keep of their runs: all tokens of each, the newest, and which sequences end with it."""

    runs: list[tuple[int, ...]]
    newest: IntArray
    ended: BoolArray


def take_runs(slots: Slots, chosen: IntArray, tokens: IntArray, counts: IntArray) -> Taken:
    """Append the tokens of these slots, `[R, K]` of which a row has `counts`, up to an end. What was computed behind an end is no
    part of the sequence: only its limit or its end stands there, since counts are cut at the limit before."""
    known = slots.known[chosen]
    places = np.arange(tokens.shape[1], dtype=np.int32)
    lengths = known[:, None] + 1 + places
    stops = (tokens[:, :, None] == slots.stops[chosen][:, None, :]).any(2) & (lengths >= slots.floor[chosen][:, None])
    ends = (stops | (lengths >= slots.limit[chosen][:, None])) & (places < counts[:, None])
    ended: BoolArray = ends.any(1)
    kept = np.where(ended, ends.argmax(1) + 1, counts)
    there = places < kept[:, None]
    rows = np.nonzero(there)[0]
    slots.tokens[chosen[rows], (lengths - 1)[there]] = tokens[there]
    slots.known[chosen] = known + kept
    slots.committed[chosen] = np.minimum(slots.committed[chosen], known + kept - 1)
    newest: IntArray = tokens[np.arange(len(chosen)), kept - 1]
    return Taken([tuple(row[:count]) for row, count in zip(tokens.tolist(), kept.tolist(), strict=True)], newest, ended)
