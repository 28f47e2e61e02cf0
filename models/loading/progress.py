"""Who wants to watch the loading: `Progress`, called as bytes are read, and `watched`, which wraps stored tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from pagoda.ops.gguf.types import GgmlType
from pagoda.quant.format import StoredTensor


class Progress(Protocol):
    """Called after each read: the tensor's name, bytes read so far and bytes of the whole checkpoint (a rank may need fewer)."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


def stored_bytes(tensor: StoredTensor) -> int:
    """Bytes that a tensor takes in its checkpoint."""
    if tensor.dtype in GgmlType.__members__:
        return prod(tensor.shape[:-1]) * GgmlType[tensor.dtype].row_bytes(tensor.shape[-1])
    size: int = getattr(torch, tensor.dtype).itemsize
    return prod(tensor.shape) * size


def watched(tensors: Mapping[str, StoredTensor], progress: Progress) -> Mapping[str, StoredTensor]:
    """The same tensors, reporting each read."""
    count = _Count(progress, sum(map(stored_bytes, tensors.values())))
    return {name: _WatchedTensor(tensor, count) for name, tensor in tensors.items()}


class _Count:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, name: str, nbytes: int) -> None:
        # A table that is read twice (a tied head in its own layout) counts once.
        self._done = min(self._done + nbytes, self._total)
        self._progress(name, self._done, self._total)


@dataclass(frozen=True)
class _WatchedTensor:
    tensor: StoredTensor
    count: _Count

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        data = self.tensor.read(index)
        self.count.add(self.name, data.nbytes)
        return data
