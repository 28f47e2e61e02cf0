"""Who wants to watch the loading: `Progress`, called as bytes are read, and `watched`, which wraps any source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from pagoda.models.weights import Naming, WeightSource
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


def watched(source: WeightSource, progress: Progress) -> WeightSource:
    """The same source, reporting each read."""
    return _Watched(source, progress)


class _Watched:
    def __init__(self, source: WeightSource, progress: Progress) -> None:
        self.naming: Naming = source.naming
        self._source = source
        self._progress = progress
        self._done = 0
        self._total = sum(map(stored_bytes, source.tensors.values()))
        self.tensors: Mapping[str, StoredTensor] = {name: _WatchedTensor(tensor, self) for name, tensor in source.tensors.items()}

    def count(self, name: str, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._total)
        self._progress(name, self._done, self._total)

    def close(self) -> None:
        self._source.close()


@dataclass(frozen=True)
class _WatchedTensor:
    tensor: StoredTensor
    owner: _Watched

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
        self.owner.count(self.name, data.nbytes)
        return data
