"""Makes committed tokens findable: as a sequence fills whole units of the hash chain, their pages enter the prefix index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.transfer.connector import PageJob


class Indexer:
    """In a decode step a sixteenth of the sequences (at 16 tokens per unit) fill one; those are done together."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        unit = ledger.index.unit
        self._unit = np.arange(unit, dtype=np.int32)
        self._new: dict[bytes, tuple[tuple[int, ...], ...]] = {}
        self._jobs = 0
        self._parts = [np.arange(unit // rule.tokens_per_page, dtype=np.int32) for rule in ledger.rules]

    def index(self, slots: IntArray) -> None:
        """Insert what these open slots have committed and not yet indexed."""
        state, unit = self._ledger.slots, self._ledger.index.unit
        units = state.committed[slots] // unit
        done = state.indexed[slots]
        grown = np.flatnonzero(units > done)
        if not len(grown):
            return
        slots, units, done = slots[grown], units[grown], done[grown]
        one = units - done == 1
        if one.any():
            self._index_one(slots[one], done[one])
        for slot, first, last in zip(slots[~one].tolist(), done[~one].tolist(), units[~one].tolist(), strict=True):
            self._index_many(slot, first, last)
        state.indexed[slots] = units
        self._save()

    def _index_one(self, slots: IntArray, units: IntArray) -> None:
        ledger, rows = self._ledger, slots[:, None]
        tokens = ledger.slots.tokens[rows, units[:, None] * ledger.index.unit + self._unit]
        pages = [
            table[rows, units[:, None] * len(parts) + parts].tolist()
            for table, parts in zip(ledger.tables.tables, self._parts, strict=True)
        ]
        for slot, unit, row, *tables in zip(slots.tolist(), units.tolist(), tokens, *pages, strict=True):
            sequence = ledger.slots.sequence(slot)
            if len(sequence.digests) < unit:
                self._extend(slot, unit)
            if len(sequence.digests) == unit:
                ledger.index.extend_one(sequence.digests, sequence.root, row, sequence.request.marks)
            self._insert(sequence.digests[unit], tables)

    def _index_many(self, slot: int, first: int, last: int) -> None:
        ledger = self._ledger
        digests = self._extend(slot, last)
        tables = ledger.tables.row(slot)
        for unit in range(first, last):
            self._insert(digests[unit], ledger.index.unit_pages(tables, unit))

    def _insert(self, digest: bytes, pages: Sequence[Sequence[int]]) -> None:
        self._ledger.index.insert(digest, pages)
        if self._ledger.connector is not None and all(min(held) > 0 for held in pages):
            self._new[digest] = tuple(tuple(held) for held in pages)

    def _save(self) -> None:
        if self._ledger.connector is not None and self._new:
            self._jobs += 1
            self._ledger.connector.save(PageJob(self._jobs, tuple(self._new), tuple(self._new.values())))
            self._new = {}

    def _extend(self, slot: int, units: int) -> list[bytes]:
        ledger = self._ledger
        sequence = ledger.slots.sequence(slot)
        tokens = ledger.slots.tokens[slot, : units * ledger.index.unit]
        ledger.index.extend(sequence.digests, sequence.root, tokens, sequence.request.marks)
        return sequence.digests
