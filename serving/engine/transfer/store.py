"""A store of pages beside the pool, of whatever kind: what it has is in a catalog here, the bytes are moved by the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine.transfer.catalog import Catalog, Key
from pagoda.serving.engine.transfer.connector import Loaded, PageJob


class Post(Protocol):
    """Calls a method of every rank's `Shelf`: in order with the steps, or `aside`, in a thread beside them. One future a rank."""

    def __call__(self, method: str, *, aside: bool = False, **arguments: Any) -> Sequence[Future[Any]]: ...


class StoreConnector:
    """Implements `CacheConnector`. Units that a rank cannot bring back are computed again.

    Args:
        keeps: the ranks finish what they save aside (`Shelf.keep`).

    Attributes:
        wake: called, from any thread, when a load has ended.
    """

    def __init__(self, catalog: Catalog, post: Post, keeps: bool = False) -> None:
        self._catalog, self._post, self._keeps = catalog, post, keeps
        self._ended: SimpleQueue[tuple[PageJob, int]] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None

    def match(self, digests: Sequence[bytes], have: int) -> int:
        for unit in range(have, len(digests)):
            if self._catalog.find(digests[unit]) is None:
                return unit
        return max(have, len(digests))

    def load(self, job: PageJob) -> None:
        keys: list[Key] = []
        for digest in job.digests:
            key = self._catalog.find(digest)
            if key is None:  # gone between match and load
                break
            keys.append(key)
            self._catalog.hold(digest)
        held = job._replace(digests=job.digests[: len(keys)])
        fetched = self._post("fetch", aside=True, keys=keys)
        _when_all(fetched, lambda counts: self._place(held, keys[: min(counts, default=0)]))

    def save(self, job: PageJob) -> None:
        added = [(self._catalog.add(digest), pages) for digest, pages in zip(job.digests, job.pages, strict=True)]
        keys, pages = [key for key, _ in added if key is not None], [_flat(held) for key, held in added if key is not None]
        if not keys:
            return
        saved = self._post("save", keys=keys, pages=pages)
        if self._keeps:
            _when_all(saved, lambda _: self._post("keep", aside=True, keys=keys))

    def done(self) -> Iterable[Loaded]:
        while not self._ended.empty():
            job, units = self._ended.get()
            for digest in job.digests:
                self._catalog.let_go(digest)
            yield Loaded(job.key, units)

    def _place(self, job: PageJob, keys: list[Key]) -> None:
        if not keys:
            self._end(job, 0)
            return
        placed = self._post("place", keys=keys, pages=[_flat(pages) for pages in job.pages[: len(keys)]])
        _when_all(placed, lambda answers: self._end(job, len(keys) if answers else 0))

    def _end(self, job: PageJob, units: int) -> None:
        self._ended.put((job, units))
        self.wake()


def _flat(pages: tuple[tuple[int, ...], ...]) -> list[int]:
    return [page for group in pages for page in group]


def _when_all(futures: Sequence[Future[Any]], then: Callable[[list[Any]], object]) -> None:
    """Call `then` with all answers, or with none where one failed, once all are there."""
    left: SimpleQueue[None] = SimpleQueue()
    for _ in futures[1:]:
        left.put(None)

    def one(_: Future[Any]) -> None:
        try:
            left.get_nowait()
        except Empty:  # this was the last
            failed = any(future.cancelled() or future.exception() is not None for future in futures)
            with suppress(EngineDeadError):  # the loop is told by others
                then([] if failed else [future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one)
