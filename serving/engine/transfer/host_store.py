"""A store of pages in host memory: the least `CacheConnector`, with the copying left to two functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pagoda.serving.engine.transfer.connector import Loaded, PageJob

Pages = tuple[tuple[int, ...], ...]


class HostStore:
    """Keeps up to `capacity` units, the least recently used go first.

    Args:
        read: page ids of one unit, per group → its bytes, of whatever kind `write` takes.
        write: puts them into other pages.
    """

    def __init__(self, capacity: int, read: Callable[[Pages], Any], write: Callable[[Pages, Any], None]) -> None:
        self._capacity = capacity
        self._read, self._write = read, write
        self._units: OrderedDict[bytes, Any] = OrderedDict()
        self._ended: list[Loaded] = []

    def match(self, digests: Sequence[bytes], have: int) -> int:
        for unit in range(have, len(digests)):
            if digests[unit] not in self._units:
                return unit
        return max(have, len(digests))

    def load(self, job: PageJob) -> None:
        count = 0
        for digest, pages in zip(job.digests, job.pages, strict=True):
            if digest not in self._units:  # evicted between match and load
                break
            self._units.move_to_end(digest)
            self._write(pages, self._units[digest])
            count += 1
        self._ended.append(Loaded(job.key, count))

    def save(self, job: PageJob) -> None:
        for digest, pages in zip(job.digests, job.pages, strict=True):
            if digest not in self._units:
                self._units[digest] = self._read(pages)
            self._units.move_to_end(digest)
        while len(self._units) > self._capacity:
            self._units.popitem(last=False)

    def done(self) -> Iterable[Loaded]:
        ended, self._ended = self._ended, []
        return ended
