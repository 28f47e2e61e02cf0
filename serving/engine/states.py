"""Pages of recurrent states: where each running sequence's state lies, where a step writes it, and which states are kept for others.

A state is one for all tokens before it, so a step reads it from a sequence's pages and writes the new one. Where the old one is kept,
because others may begin there, the new one goes to fresh pages; otherwise to the same ones. What is kept is decided by where a step
ends: at a whole number of units of the hash chain. So steps of prompts end at such places on purpose (`clip`).

A step with drafts writes to fresh pages too. Where one of them is rejected, the sequence goes back to the state before the step, and what
was accepted is computed again (`verified`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.hal.kv import CacheGroup, CacheKind
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.plan import BoolArray, IntArray

STOPS = 3
"""Places where a prompt's steps end: where another prompt parted from it, at its last whole unit, and where its siblings begin."""

FAR = np.iinfo(np.int32).max


class Left(NamedTuple):
    """A state of `tokens` tokens of the sequence in `slot`, which step `step` has read and the sequence has moved on from."""

    step: int
    slot: int
    tokens: int
    pages: IntArray


class Tried(NamedTuple):
    """What a step with drafts began with: `tokens` of the slot's sequence, their state, and whether that is kept for others."""

    step: int
    tokens: int
    pages: IntArray
    kept: bool


def state_group(groups: tuple[CacheGroup, ...]) -> CacheGroup | None:
    """The group of the recurrent layers: the last one, where there is any."""
    return groups[-1] if groups and groups[-1].kind is CacheKind.STATE else None


def kept_every(groups: tuple[CacheGroup, ...]) -> int:
    """Tokens of an answer after which its state is kept: as many as take as many pages, or 16 units of a model that keeps no tokens."""
    *others, states = groups
    per_unit = sum(states.tokens_per_page // group.tokens_per_page for group in others)
    return states.tokens_per_page * (-(-states.pages_per_state // per_unit) if per_unit else 16)


class StateTables:
    """Per slot: `pages` `[S, n]` of the state after all steps planned, 0 where there is none; `kept` `[S]`, it may not be overwritten.

    Args:
        group: of the recurrent layers. every: tokens of an answer after which a state is kept: as many as take as much memory.
        drafted: `Slots.drafted`.
    """

    def __init__(self, pool: BlockPool, group: CacheGroup, slots: int, every: int, drafted: IntArray) -> None:
        self.pool = pool
        self._drafted = drafted
        self._tried: dict[int, Tried] = {}
        self.count = group.pages_per_state
        self.unit = group.tokens_per_page
        self._every = every
        self.pages = np.zeros((slots, self.count), np.int32)
        self._next = np.zeros((slots, self.count), np.int32)
        self.kept = np.zeros(slots, np.bool_)
        self.stops = np.full((slots, STOPS), FAR, np.int32)
        self._left: list[Left] = []

    @property
    def peak(self) -> int:
        """Most pages that a sequence needs at a time: of a state that is read and kept, and of the next."""
        return 2 * self.count

    def need(self, slots: IntArray) -> IntArray:
        """`[R]`: pages that the next step of these slots writes and they lack."""
        need: IntArray = (self.kept[slots] | (self._drafted[slots] > 0) | (self.pages[slots, 0] == 0)) * np.int32(self.count)
        return need

    def extend(self, slots: IntArray, pages: IntArray) -> None:
        """These slots, those that lack pages, will write to `pages`."""
        self._next[slots] = pages.reshape(-1, self.count)

    def adopt(self, slot: int, pages: IntArray) -> None:
        """Begin with a state of others, whose references are already its own."""
        self.pages[slot] = pages
        self.kept[slot] = True

    def take_copy(self, slot: int) -> IntArray:
        """Begin with a copy of another state: the pages that it has to be copied to."""
        self.pages[slot] = self._next[slot]
        self._next[slot] = 0
        return self.pages[slot]

    def rows(self, slots: IntArray) -> IntArray:
        """`[R, 2n]`: pages that a step reads and pages that it writes."""
        return np.concatenate([self.pages[slots], self._target(slots)], axis=1)

    def clip(self, slots: IntArray, starts: IntArray, counts: IntArray, want: IntArray) -> IntArray:
        """`counts` of the `want` tokens, or fewer, so that a step ends at a stop, or else at a whole unit."""
        stops = self.stops[slots]
        next_stop = np.where(stops > starts[:, None], stops, FAR).min(axis=1)
        counts = np.minimum(counts, next_stop - starts)
        short = (counts < want) & (starts + counts != next_stop)
        whole = (starts + counts) // self.unit * self.unit - starts
        clipped: IntArray = np.where(short & (whole > 0), whole, counts).astype(np.int32)
        return clipped

    def advance(self, step: int, slots: IntArray, starts: IntArray, ends: IntArray) -> None:
        """The step is planned: what it writes is the state now."""
        moved = (self._next[slots, 0] > 0) & (self.pages[slots, 0] > 0)
        for slot, start in zip(slots[moved].tolist(), starts[moved].tolist(), strict=True):
            if self._drafted[slot]:
                self._tried[slot] = Tried(step, start, self.pages[slot].copy(), bool(self.kept[slot]))
            else:
                self._left.append(Left(step, slot, start, self.pages[slot].copy()))
        self.pages[slots] = self._target(slots)
        self._next[slots] = 0
        self.kept[slots] = self._worth_keeping(starts, ends)

    def verified(self, slot: int, whole: bool) -> int | None:
        """A step with drafts has come back, `whole` if it took all of them. Returns how many tokens the state is of now, None if all."""
        tried = self._tried.pop(slot, None)
        if tried is None:
            return None
        if not whole:
            self.pool.release(self.pages[slot])
            self.pages[slot], self.kept[slot] = tried.pages, tried.kept
            return tried.tokens
        if tried.kept:
            self._left.append(Left(tried.step, slot, tried.tokens, tried.pages))
        else:
            self.pool.release(tried.pages)
        return None

    def let_go(self, step: int) -> list[Left]:
        """States that this committed step, or one before it, read last; the caller takes over their references."""
        done = [left for left in self._left if left.step <= step]
        if done:
            self._left = [left for left in self._left if left.step > step]
        return done

    def release(self, slot: int) -> None:
        """Give back all pages of the slot."""
        if (tried := self._tried.pop(slot, None)) is not None:
            self.pool.release(tried.pages)
        for table in (self.pages, self._next):
            if table[slot, 0]:
                self.pool.release(table[slot])
                table[slot] = 0
        self.kept[slot] = False
        self.stops[slot] = FAR

    def _target(self, slots: IntArray) -> IntArray:
        return np.where(self._next[slots] > 0, self._next[slots], self.pages[slots])

    def _worth_keeping(self, starts: IntArray, ends: IntArray) -> BoolArray:
        kept: BoolArray = (ends % self.unit == 0) & ((ends - starts > 1) | (ends % self._every == 0))
        return kept
