"""The block pool: page ids, reference counts, and which free pages still hold a known prefix. It knows no tensors."""

from __future__ import annotations

import time
from collections import OrderedDict

import numpy as np
from pagoda.hal.errors import CapacityError
from pagoda.serving.engine.histograms import Histograms
from pagoda.serving.engine.plan import IntArray


class BlockPool:
    """Pages `1 … num_pages − 1`; page 0 is never handed out. Every call costs O(pages named), whatever the size of the pool.

    A page is *in use* (references > 0), *cached* (free, but its key still finds it; evicted least recently freed first) or
    *free*. A key belongs to one page and a page has at most one key.
    """

    def __init__(self, num_pages: int, histograms: Histograms | None = None) -> None:
        """`histograms`: told how long pages with a known prefix lasted, and how often they were wanted."""
        if num_pages < 2:
            raise CapacityError(
                f"a pool needs at least 2 pages, got {num_pages}: give the KV cache more memory", asked=2, available=num_pages
            )
        self.num_pages = num_pages
        self._references = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._spreads = (histograms or Histograms()).of
        self._born = np.zeros(num_pages)
        self._wanted = np.zeros(num_pages)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.num_pages - 1 - self.available

    def allocate(self, count: int) -> IntArray:
        """`count` pages with one reference each. Raises `CapacityError`, taking none, when there are fewer."""
        if count > self.available:
            raise CapacityError(
                f"{count} pages asked for, {self.available} of {self.num_pages - 1} available", asked=count, available=self.available
            )
        split = max(len(self._free) - count, 0)
        taken = self._free[split:]
        del self._free[split:]
        now = time.monotonic()
        if evicted := [self._evict() for _ in range(count - len(taken))]:
            self._tell_evicted(np.array(evicted, np.int32), now)
        pages = np.array(taken + evicted, np.int32)
        self._references[pages] = 1
        self._born[pages] = self._wanted[pages] = now
        return pages

    def share(self, pages: IntArray) -> None:
        """One more reference to each of these distinct pages, in use or cached."""
        for page in pages[self._references[pages] == 0].tolist():
            del self._cached[page]
        self._references[pages] += 1

    def found(self, pages: IntArray) -> None:
        """Another request wants the prefix in these pages."""
        now = time.monotonic()
        self._spreads["page_gap"].extend(now - self._wanted[pages])
        self._wanted[pages] = now

    def release(self, pages: IntArray) -> None:
        """One reference less to each; ids may repeat. Of pages released together the last is evicted first."""
        np.subtract.at(self._references, pages, 1)
        if self._references[pages].min(initial=0) < 0:
            raise AssertionError(f"page released more often than taken: {pages[self._references[pages] < 0]}")
        for page in dict.fromkeys(pages[self._references[pages] == 0].tolist()[::-1]):
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def references(self, pages: IntArray) -> IntArray:
        return self._references[pages]

    def insert(self, key: bytes, page: int) -> bool:
        """Let `key` find this page in use; False where another page has the key or the page has one."""
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        return True

    def find(self, key: bytes) -> int:
        """The page of this key, or 0."""
        return self._page_of.get(key, 0)

    def forget(self) -> None:
        """Drop all keys; cached pages become free."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()

    def _tell_evicted(self, pages: IntArray, now: float) -> None:
        self._spreads["page_lifetime"].extend(now - self._born[pages])
        self._spreads["page_idle"].extend(now - self._wanted[pages])

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
