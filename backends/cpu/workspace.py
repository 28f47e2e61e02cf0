"""Memory that all recorded steps of a device share: they run one after the other, so what one drops another may write over."""

from __future__ import annotations

import ctypes
import weakref
from bisect import insort
from itertools import pairwise

import torch

ALIGNMENT = 64
CHUNK = 4 << 20
"""Bytes that are asked for at a time; what no step has written to costs nothing."""


class Workspace:
    """The chunks, as many as the largest step needed; they go with the last step that holds them."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []

    def grow(self, nbytes: int) -> tuple[int, int]:
        """A new chunk of at least `nbytes`: its first address and its end."""
        chunk = torch.empty(max(nbytes, CHUNK) + ALIGNMENT, dtype=torch.uint8)
        self.chunks.append(chunk)
        return _bounds(chunk)


class Taken:
    """What one step takes of a workspace while it is recorded. A tensor's place is free again when the tensor and its views are garbage:
    a replay makes the same calls in the same order, so whoever takes the place writes it after its last reader."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._free = sorted(map(_bounds, workspace.chunks))
        self._live: dict[int, int] = {}

    def __len__(self) -> int:
        """Tensors that are not garbage."""
        return len(self._live)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape, strides and dtype, without content."""
        nbytes = -(-x.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        start = self._place(nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(start)
        weakref.finalize(memory, self._release, start)
        return _view(memory, x)

    def named(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor at the address of `x` that keeps no place from being used again; `x` itself where it lies elsewhere."""
        start = x.untyped_storage().data_ptr()
        if start not in self._live:
            return x
        return _view((ctypes.c_uint8 * self._live[start]).from_address(start), x)

    def holds(self, x: torch.Tensor) -> bool:
        """Whether `x` lies in the workspace."""
        return x.untyped_storage().data_ptr() in self._live

    def _place(self, nbytes: int) -> int:
        fitting = next((span for span in self._free if span[1] - span[0] >= nbytes), None)
        if fitting is None:
            fitting = self._workspace.grow(nbytes)
        else:
            self._free.remove(fitting)
        start, end = fitting
        if end - start > nbytes:
            insort(self._free, (start + nbytes, end))
        self._live[start] = nbytes
        return start

    def _release(self, start: int) -> None:
        insort(self._free, (start, start + self._live.pop(start)))
        merged: list[tuple[int, int]] = self._free[:1]
        for (_, before), (first, end) in pairwise(self._free):
            if before == first:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((first, end))
        self._free = merged


def _bounds(chunk: torch.Tensor) -> tuple[int, int]:
    start = -(-chunk.data_ptr() // ALIGNMENT) * ALIGNMENT
    return start, start + (chunk.numel() - ALIGNMENT) // ALIGNMENT * ALIGNMENT


def _view(memory: ctypes.Array[ctypes.c_uint8], x: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.size(), x.stride(), x.storage_offset())
