"""Tensors that are in memory already: a trainer's state, a live stream of named tensors, a file that torch loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.weights import Naming
from pagoda.quant.format import StoredTensor


@dataclass(frozen=True)
class MemoryTensor:
    """A `StoredTensor` that is a torch tensor; reads are views."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        return self.tensor[index].detach()


class MemorySource:
    """A `WeightSource` of tensors by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], naming: Naming = "hf") -> None:
        self.naming: Naming = naming
        self.tensors: Mapping[str, StoredTensor] = {name: MemoryTensor(name, tensor) for name, tensor in tensors.items()}

    @classmethod
    def drain(cls, stream: Iterable[tuple[str, torch.Tensor]], naming: Naming = "hf") -> MemorySource:
        """Everything that a stream of (name, tensor) yields. Raises `CheckpointError` when a name comes twice."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in stream:
            if name in tensors:
                raise CheckpointError(f"the stream of weights sends {name} twice; each tensor may come once")
            tensors[name] = tensor
        return cls(tensors, naming)

    def close(self) -> None:
        self.tensors = {}
