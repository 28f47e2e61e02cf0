"""Memory for packed weights in large pages, which memory is read from some 15 % faster than from small ones."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from functools import cache

import torch

LARGE_PAGE = 2 << 20
CHUNK = 32 << 20
"""Bytes that small weights share: most are smaller than a large page."""


class Arena:
    """Hands out pieces of chunks, one after the other; a chunk's memory goes when all its pieces are garbage and a new one was begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = _Chunk(0)
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, uint8 `[nbytes]`, a storage of its own; its address is a multiple of 64."""
        with self._lock:
            if nbytes > CHUNK // 2:
                return _Chunk(nbytes).piece(0, nbytes)
            start = -(-self._used // 64) * 64
            if start + nbytes > self._chunk.nbytes:
                self._chunk, start = _Chunk(CHUNK), 0
            self._used = start + nbytes
            return self._chunk.piece(start, nbytes)


@cache
def arena() -> Arena:
    """The process's, as there is one of torch's allocators."""
    return Arena()


class _Chunk:
    """A mapping of its own, unmapped with its last piece: what a heap gets back may stay with the process."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        if nbytes == 0:
            return
        # Private where one may say so: shared memory gets large pages by another setting of the system.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, nbytes + LARGE_PAGE, **private)
        self._skip = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            # Where the kernel has no large pages to give, nothing is lost.
            with suppress(OSError):
                self._memory.madvise(advice, self._skip, nbytes // LARGE_PAGE * LARGE_PAGE)

    def piece(self, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of it as a storage of their own, not a slice: whoever counts memory by storages shall count the piece and not the chunk."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=self._skip + start, count=nbytes)
