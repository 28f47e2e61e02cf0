"""Where a sequence can begin: how many of its tokens lie in pages already, those of a running sibling or of the prefix index."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.prefix import NO_PAGES
from pagoda.serving.engine.sequence import Sequence, State

SIBLINGS = 32
"""Siblings that are compared; the first ones have the prompt, which is most of what is shared."""


class Start(NamedTuple):
    """Tokens whose KV is there, their shared pages per group, and per group a page to copy (0: none).

    Of models with recurrent layers: `state`, pages of the state after those tokens to begin with, or `running`, pages of a state that
    its owner goes on with and that has to be copied; `parting`: where the prompt parts from one before it, beyond them (0: nowhere).
    """

    length: int
    pages: tuple[IntArray, ...]
    partial: tuple[int, ...]
    state: IntArray = NO_PAGES
    running: IntArray = NO_PAGES
    parting: int = 0


class StartFinder:
    """Looks for the longest beginning. It changes nothing but the digests that a sequence keeps."""

    def __init__(self, ledger: Ledger, caching: bool) -> None:
        self._ledger = ledger
        self._caching = caching

    def find(self, sequence: Sequence, fresh: list[int]) -> Start | None:
        """`fresh` are slots that begin in this very step: nothing is in their pages yet.

        None tells a beam to wait: a sibling is about to compute what both need, and submit counted on their sharing it.
        """
        if len(sequence.request.sequences) == 1 or sequence.wants_prompt_logprobs:
            return self._in_index(sequence)
        sibling, length = self._nearest(sequence)
        if sibling is not None and length == len(sequence.tokens) - 1 and self._has(sibling, length, fresh):
            return self._in_pages_of(sibling, length) or self._in_index(sequence)
        prefix = self._in_index(sequence)
        if sibling is None or length <= prefix.length:
            return prefix
        if not self._has(sibling, length, fresh):
            return None if sequence.request.beams is not None else prefix
        return self._in_pages_of(sibling, length) or prefix

    def _has(self, sibling: Sequence, length: int, fresh: list[int]) -> bool:
        return sibling.slot not in fresh and int(self._ledger.slots.computed[sibling.slot]) >= length

    def _in_index(self, sequence: Sequence) -> Start:
        index = self._ledger.index
        longest = len(sequence.tokens) - 1
        if not self._caching or sequence.computes_all:
            longest = 0
        if longest >= index.unit:
            index.extend(sequence.digests, sequence.root, sequence.tokens, sequence.request.marks)
        hit = index.find(sequence.digests, longest)
        parting = index.parting(sequence.digests, hit.length // index.unit, longest) if self._ledger.states is not None else 0
        return Start(hit.length, hit.pages, (0,) * len(self._ledger.rules), hit.state, parting=parting)

    def _nearest(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sibling with the longest common beginning, of at most all tokens but the last."""
        slots, best, length = self._ledger.slots, None, 0
        for sibling in sequence.request.sequences[:SIBLINGS]:
            if sibling is sequence or sibling.state is not State.RUNNING or sibling.epoch != sequence.epoch:
                continue
            known = slots.tokens[sibling.slot, : slots.known[sibling.slot]]
            common = min(_common(sequence.tokens, known), len(sequence.tokens) - 1)
            if common > length:
                best, length = sibling, common
            if length == len(sequence.tokens) - 1:
                break
        return best, length

    def _in_pages_of(self, sibling: Sequence, length: int) -> Start | None:
        """Share its full pages and copy the last one; None where it has dropped pages that are needed here, or its state has gone on."""
        tables, slot, states = self._ledger.tables, sibling.slot, self._ledger.states
        if states is not None and int(self._ledger.slots.computed[slot]) != length:
            return None
        pages, partial = [], []
        for group, rule in enumerate(self._ledger.rules):
            first, full = rule.first_page(length), length // rule.tokens_per_page
            if tables.first[group][slot] > first:
                return None
            table = tables.tables[group][slot]
            pages.append(np.where(np.arange(full) >= first, table[:full], 0).astype(np.int32))
            partial.append(int(table[full]) if length % rule.tokens_per_page else 0)
        return Start(length, tuple(pages), tuple(partial), running=NO_PAGES if states is None else states.pages[slot].copy())


def _common(one: IntArray, other: IntArray) -> int:
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
