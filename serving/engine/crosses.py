"""Pages of what encoders gave: written once as a request begins, read by each of its steps, found again by those with the same input."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import blake2b

import numpy as np
from pagoda.hal.kv import CacheGroup
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.messages import EncoderPrompt
from pagoda.serving.engine.plan import Encode, IntArray


def digest_of(given: EncoderPrompt) -> str:
    """What tells one input of an encoder from another."""
    parts = (repr(given.token_ids).encode(), repr(given.shape).encode(), given.features)
    return blake2b(b"\0".join(parts), digest_size=16).hexdigest()


class CrossTables:
    """Per slot: `tables` `[S, P]` of each group, `length` `[S]` tokens that the encoder gives.

    Args:
        groups: those of kind `CROSS`.
        caching: pages of ended requests are found again.
    """

    def __init__(self, pool: BlockPool, groups: Seq[CacheGroup], slots: int, caching: bool) -> None:
        self._pool, self._caching = pool, caching
        self._sizes = tuple(group.tokens_per_page for group in groups)
        self._tables = tuple(np.zeros((slots, group.table_width(0)), np.int32) for group in groups)
        self.length = np.zeros(slots, np.int32)
        self._encodes: list[Encode] = []

    def pages(self, tokens: int) -> int:
        """Pages that so many tokens of an encoder take, over all groups."""
        return sum(-(-tokens // size) for size in self._sizes)

    def need(self, root: bytes, tokens: int, sibling: int | None) -> int:
        """Pages fewer in the pool when a sequence begins: none where a sibling has them, those of ended requests included."""
        if sibling is not None:
            return 0
        found = self._find(root, tokens)
        if found is None:
            return self.pages(tokens)
        return sum(int((self._pool.references(pages) == 0).sum()) for pages in found)

    def known(self, root: bytes, tokens: int, sibling: int | None) -> bool:
        """Whether nothing needs to be encoded."""
        return sibling is not None or self._find(root, tokens) is not None

    def begin(self, slot: int, root: bytes, given: EncoderPrompt, tokens: int, sibling: int | None) -> None:
        """The slot's pages: a sibling's, or found ones, or fresh ones, which this step's encoder fills."""
        self.length[slot] = tokens
        shared = self._of(sibling) if sibling is not None else self._find(root, tokens)
        if shared is not None:
            for table, pages in zip(self._tables, shared, strict=True):
                self._pool.share(pages)
                table[slot, : len(pages)] = pages
            return
        fresh = self._pool.allocate(self.pages(tokens))
        for table, size in zip(self._tables, self._sizes, strict=True):
            count = -(-tokens // size)
            table[slot, :count], fresh = fresh[:count], fresh[count:]
        # Found from now on: later steps, and what else this one does, read the pages after the encoder wrote them.
        for group, pages in enumerate(self._of(slot) if self._caching else ()):
            for index, page in enumerate(pages.tolist()):
                self._pool.insert(_name(root, group, index), page)
        self._encodes.append(Encode(given, tokens, self._of(slot)))

    def take_encodes(self) -> tuple[Encode, ...]:
        """What the step's encoder has to do."""
        taken, self._encodes = tuple(self._encodes), []
        return taken

    def release(self, slot: int) -> None:
        """Give back all pages of the slot."""
        for table, pages in zip(self._tables, self._of(slot), strict=True):
            self._pool.release(pages)
            table[slot] = 0
        self.length[slot] = 0

    def rows(self, slots: IntArray) -> tuple[IntArray, ...]:
        """Per group `[R, widest]`."""
        longest = int(self.length[slots].max(initial=1))
        return tuple(table[slots, : -(-longest // size)] for table, size in zip(self._tables, self._sizes, strict=True))

    def _of(self, slot: int) -> tuple[IntArray, ...]:
        tokens = int(self.length[slot])
        return tuple(table[slot, : -(-tokens // size)].copy() for table, size in zip(self._tables, self._sizes, strict=True))

    def _find(self, root: bytes, tokens: int) -> tuple[IntArray, ...] | None:
        """All pages of this input, or None; an input's first page is seldom there without the others."""
        found = []
        for group, size in enumerate(self._sizes):
            pages = [self._pool.find(_name(root, group, index)) for index in range(-(-tokens // size))]
            if not all(pages):
                return None
            found.append(np.array(pages, np.int32))
        return tuple(found)


def _name(root: bytes, group: int, index: int) -> bytes:
    return root + b"\xfe" + bytes((group,)) + index.to_bytes(4, "little")
