"""The prefix index: a chain of content hashes over a sequence's tokens, and the pages that it finds in the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.groups import GroupRule, hash_unit
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.states import StateTables

SEEN = 65536
"""Units of prompts that are remembered beyond their pages, to tell where prompts part."""

NO_PAGES = np.zeros(0, np.int32)
NO_MARKS: Mapping[int, bytes] = MappingProxyType({})


@lru_cache(1024)
def chain_root(salt: str | None, adapter: str | None, extra: tuple[str, ...] = ()) -> bytes:
    """Start of a chain: sequences share pages only where the salt, the adapter and all extra keys are equal."""
    return blake2b(repr((salt, adapter, extra)).encode(), digest_size=16).digest()


class Hit(NamedTuple):
    """Tokens found, and per group the block table that holds them (0 for pages that no query will read again).

    `state`: pages of the recurrent layers' state after them; empty for models without.
    """

    length: int
    pages: tuple[IntArray, ...]
    state: IntArray = NO_PAGES


class PrefixIndex:
    """Finds and inserts pages of all groups. An entry of the chain covers `unit` tokens: whole pages in every group."""

    def __init__(self, pool: BlockPool, rules: Sequence[GroupRule], states: StateTables | None = None) -> None:
        self.unit = hash_unit(rules) if states is None else states.unit
        self._state_names = [b"\xff" + part.to_bytes(2, "little") for part in range(states.count)] if states is not None else []
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._pool = pool
        self._rules = tuple(rules)
        self._per_unit = [self.unit // rule.tokens_per_page for rule in rules]
        self._names = [[bytes((group,)) + part.to_bytes(2, "little") for part in range(n)] for group, n in enumerate(self._per_unit)]

    def extend(self, digests: list[bytes], root: bytes, tokens: IntArray, marks: Mapping[int, bytes] = NO_MARKS) -> None:
        """Append the digests of the whole units of `tokens` that `digests` lacks; `marks`: what units depend on beside them."""
        first = len(digests) * self.unit
        content, size = tokens[first:].tobytes(), self.unit * tokens.itemsize
        last = digests[-1] if digests else root
        for start in range(0, len(content) - size + 1, size):
            last = blake2b(last + content[start : start + size] + marks.get(len(digests), b""), digest_size=16).digest()
            digests.append(last)

    def extend_one(self, digests: list[bytes], root: bytes, tokens: IntArray, marks: Mapping[int, bytes] = NO_MARKS) -> None:
        """Append the digest of the next unit."""
        mark = marks.get(len(digests), b"")
        digests.append(blake2b((digests[-1] if digests else root) + tokens.tobytes() + mark, digest_size=16).digest())

    def find(self, digests: Sequence[bytes], longest: int) -> Hit:
        """The longest prefix of at most `longest` tokens whose next query finds every page that it reads."""
        units = min(longest // self.unit, len(digests))
        found: list[dict[int, int]] = [{} for _ in self._rules]
        group = 0
        while group < len(self._rules) + bool(self._state_names) and units:
            state = group == len(self._rules)
            kept = self._reach_state(digests, units) if state else self._reach(group, digests, units, found[group])
            group = group + 1 if kept == units else 0
            units = kept
        length = units * self.unit
        tables = tuple(self._table(group, length, found[group]) for group in range(len(self._rules)))
        return Hit(length, tables, self._state_at(digests[units - 1]) if units and self._state_names else NO_PAGES)

    def parting(self, digests: Sequence[bytes], first: int, longest: int) -> int:
        """Tokens, beyond `first` units, that some prompt before had too and no page need hold any more; 0 where there is none."""
        units = first
        while units < min(longest // self.unit, len(digests)) and digests[units] in self._seen:
            units += 1
        return units * self.unit if units > first else 0

    def insert(self, digest: bytes, pages: Sequence[Sequence[int]]) -> None:
        """Index one unit: `pages` are its pages in each group; those that left a window (0) are skipped."""
        if self._state_names:
            self._remember(digest)
        for names, held in zip(self._names, pages, strict=True):
            for name, page in zip(names, held, strict=True):
                if page:
                    self._pool.insert(digest + name, page)

    def insert_state(self, digest: bytes, pages: IntArray) -> None:
        """Index the state after a unit."""
        for name, page in zip(self._state_names, pages.tolist(), strict=True):
            self._pool.insert(digest + name, page)

    def _remember(self, digest: bytes) -> None:
        self._seen[digest] = None
        self._seen.move_to_end(digest)
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)

    def _state_at(self, digest: bytes) -> IntArray:
        return np.array([self._pool.find(digest + name) for name in self._state_names], np.int32)

    def _reach_state(self, digests: Sequence[bytes], units: int) -> int:
        while units and not self._state_at(digests[units - 1]).all():
            units -= 1
        return units

    def unit_pages(self, tables: Sequence[IntArray], unit: int) -> tuple[tuple[int, ...], ...]:
        """The pages of one unit in each group, of a sequence's block tables."""
        return tuple(tuple(table[unit * n : (unit + 1) * n].tolist()) for table, n in zip(tables, self._per_unit, strict=True))

    def _reach(self, group: int, digests: Sequence[bytes], units: int, found: dict[int, int]) -> int:
        rule, per_unit = self._rules[group], self._per_unit[group]
        first, last = rule.first_page(units * self.unit), units * per_unit
        # A window is searched from its end, so that a miss rules out most; a whole prefix from its start, so that the first miss ends it.
        for index in range(first, last) if rule.window is None else range(last - 1, first - 1, -1):
            page = found.get(index) or self._pool.find(digests[index // per_unit] + self._names[group][index % per_unit])
            if not page:
                return index // per_unit
            found[index] = page
        return units

    def _table(self, group: int, length: int, found: dict[int, int]) -> IntArray:
        rule = self._rules[group]
        table = np.zeros(length // rule.tokens_per_page, np.int32)
        for index in range(rule.first_page(length), len(table)):
            table[index] = found[index]
        return table
