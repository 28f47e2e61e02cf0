"""Block tables of the running sequences, one array a cache group, kept in step with the pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.crosses import CrossTables
from pagoda.serving.engine.groups import GroupRule
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.states import StateTables


class BlockTables:
    """Per group of tokens: `tables` `[S, P]` page ids (0 past the end and for pages that left a window), `length` `[S]` entries in
    use, `first` `[S]` entries that left the window. `states`: the pages of recurrent layers, of models that have any; `crosses`: those of
    what encoders gave."""

    def __init__(
        self,
        pool: BlockPool,
        rules: Seq[GroupRule],
        slots: int,
        longest: int,
        states: StateTables | None = None,
        crosses: CrossTables | None = None,
    ) -> None:
        self.pool = pool
        self.states = states
        self.crosses = crosses
        self.rules = tuple(rules)
        self.tables = tuple(np.zeros((slots, rule.pages(longest)), np.int32) for rule in rules)
        self.length = tuple(np.zeros(slots, np.int32) for _ in rules)
        self.first = tuple(np.zeros(slots, np.int32) for _ in rules)

    def need(self, slots: IntArray, ends: IntArray) -> IntArray:
        """`[G, R]`: pages that these slots lack to hold `ends` tokens; those of states last."""
        needs = np.empty((len(self.rules) + (self.states is not None), len(slots)), np.int32)
        for row, rule, length in zip(needs, self.rules, self.length, strict=False):
            np.maximum(-(-ends // rule.tokens_per_page) - length[slots], 0, out=row)
        if self.states is not None:
            needs[-1] = self.states.need(slots)
        return needs

    def extend(self, slots: IntArray, needs: IntArray) -> None:
        """Append as many fresh pages as `needs` says."""
        total = int(needs.sum())
        if not total:
            return
        pages, taken = self.pool.allocate(total), 0
        if self.states is not None and (count := int(needs[-1].sum())):
            self.states.extend(slots[needs[-1] > 0], pages[:count])
            taken = count
        for need, table, length in zip(needs, self.tables, self.length, strict=False):
            rows = np.flatnonzero(need)
            if not len(rows):
                continue
            counts, owners = need[rows], slots[rows]
            ends = np.cumsum(counts)
            count = int(ends[-1])
            offset = np.arange(count, dtype=np.int32) - np.repeat(ends - counts, counts)
            table[np.repeat(owners, counts), np.repeat(length[owners], counts) + offset] = pages[taken : taken + count]
            length[owners] += counts
            taken += count

    def grow(self, slot: int, tokens: int) -> None:
        """Append the fresh pages that one slot lacks to hold so many tokens: `extend` for one whose sequence begins."""
        if self.states is not None:
            slots = np.array([slot], np.int32)
            self.extend(slots, self.need(slots, np.array([tokens], np.int32)))
            return
        lengths = [int(length[slot]) for length in self.length]
        needs = [max(rule.pages(tokens) - length, 0) for rule, length in zip(self.rules, lengths, strict=True)]
        pages, taken = self.pool.allocate(sum(needs)), 0
        for group, (need, length) in enumerate(zip(needs, lengths, strict=True)):
            self.tables[group][slot, length : length + need] = pages[taken : taken + need]
            self.length[group][slot] = length + need
            taken += need

    def adopt(self, slot: int, group: int, pages: IntArray) -> None:
        """Begin the slot's table with pages whose references are already its own."""
        self.tables[group][slot, : len(pages)] = pages
        self.length[group][slot] = len(pages)
        self.first[group][slot] = int(np.argmax(pages > 0)) if pages.any() else len(pages)

    def trim(self, slots: IntArray, positions: IntArray) -> None:
        """Release pages that no query at or after `positions` reads."""
        for rule, table, length, first in zip(self.rules, self.tables, self.length, self.first, strict=True):
            if rule.window is None:
                continue
            new = np.minimum(rule.first_page(positions), length[slots])
            gone = new - first[slots]
            ones = gone == 1
            self._drop_one(table, first, slots[ones])
            for slot, start, count in zip(slots[gone > 1].tolist(), first[slots[gone > 1]].tolist(), gone[gone > 1].tolist(), strict=True):
                pages = table[slot, start : start + count]
                self.pool.release(pages)
                pages[:] = 0
                first[slot] += count

    def release(self, slot: int) -> None:
        """Give back all pages of the slot."""
        for table, length, first in zip(self.tables, self.length, self.first, strict=True):
            pages = table[slot, first[slot] : length[slot]]
            self.pool.release(pages)
            pages[:] = 0
            length[slot] = first[slot] = 0
        if self.states is not None:
            self.states.release(slot)
        if self.crosses is not None:
            self.crosses.release(slot)

    def rows(self, slots: IntArray) -> tuple[IntArray, ...]:
        """Per group `[R, widest]`; of what encoders gave after those, of states the pages read and those written."""
        rows = tuple(table[:, : int(length[slots].max(initial=1))][slots] for table, length in zip(self.tables, self.length, strict=True))
        if self.crosses is not None:
            rows = (*rows, *self.crosses.rows(slots))
        return rows if self.states is None else (*rows, self.states.rows(slots))

    def row(self, slot: int) -> tuple[IntArray, ...]:
        """Per group of tokens the entries in use of one slot."""
        return tuple(table[slot, : length[slot]] for table, length in zip(self.tables, self.length, strict=True))

    def _drop_one(self, table: IntArray, first: IntArray, slots: IntArray) -> None:
        if len(slots):
            self.pool.release(table[slots, first[slots]])
            table[slots, first[slots]] = 0
            first[slots] += 1
