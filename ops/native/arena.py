"""Memory for packed weights in large pages, which memory is read from some 15 % faster than from small ones."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch

LARGE_PAGE = 2 << 20
CHUNK = 32 << 20
"""Bytes that small weights share: most are smaller than a large page."""

_MADV_HUGEPAGE = 14


class Arena:
    """Hands out pieces of chunks, one after the other; a chunk's memory goes when all its pieces are garbage and a new one was begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Uninitialised memory, uint8 `[nbytes]`, a storage of its own; its address is a multiple of 64."""
        with self._lock:
            if nbytes > CHUNK // 2:
                return _piece(_large(nbytes), 0, nbytes)
            start = -(-self._used // 64) * 64
            if start + nbytes > self._chunk.numel():
                self._chunk, start = _large(CHUNK), 0
            self._used = start + nbytes
            return _piece(self._chunk, start, nbytes)


@cache
def arena() -> Arena:
    """The process's, as there is one of torch's allocators."""
    return Arena()


def _piece(chunk: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Not a slice: whoever counts memory by storages shall count the piece and not its chunk.
    memory = (ctypes.c_uint8 * nbytes).from_address(chunk.data_ptr() + start)
    memory.chunk = chunk  # type: ignore[attr-defined]  # keeps it alive as long as the storage keeps `memory`
    return torch.frombuffer(memory, dtype=torch.uint8)


def _large(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + LARGE_PAGE, dtype=torch.uint8)
    skip = -memory.data_ptr() % LARGE_PAGE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        # Advice: where the kernel has no large pages to give, nothing is lost.
        advise(ctypes.c_void_p(memory.data_ptr() + skip), ctypes.c_size_t(nbytes // LARGE_PAGE * LARGE_PAGE), _MADV_HUGEPAGE)
    return memory[skip : skip + nbytes]
