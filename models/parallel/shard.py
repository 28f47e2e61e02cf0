"""The parallel plan, derived: which part of each dimension a rank holds. Roles of tensors say which dimension is split.

| role | split | after it |
| --- | --- | --- |
| column | outputs (q, k, v, gate, up) | nothing |
| row | inputs (o, down) | sum over ranks; the bias is added by rank 0 |
| vocab | rows of the embedding, outputs of the head | sum; gather |
| expert | hidden numbers of every expert, or whole experts where those do not divide | sum |
| heads | per-head numbers (sinks) | nothing |
| replicated | nothing (norms, router, positions) | nothing |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagoda.hal.comm import Communicator
from pagoda.hal.errors import ConfigError

if TYPE_CHECKING:
    import torch

Role = Literal["column", "row", "vocab", "expert", "heads", "replicated"]

SPREAD: Mapping[Role, int | None] = {"column": 0, "row": 1, "vocab": 0, "expert": 0, "heads": 0, "replicated": None}
"""The same as a dimension of the stored tensor, for devices that part whole tensors over their chips; experts go whole there."""


@dataclass(frozen=True)
class Span:
    """A rank's part of a dimension of `total` numbers."""

    total: int
    part: range

    @classmethod
    def whole(cls, total: int) -> Span:
        return cls(total, range(total))

    @property
    def index(self) -> slice:
        return slice(self.part.start, self.part.stop)

    def __len__(self) -> int:
        return len(self.part)

    def times(self, size: int) -> Span:
        """The same part where each unit is `size` numbers wide."""
        return Span(self.total * size, range(self.part.start * size, self.part.stop * size))


@dataclass(frozen=True)
class Shard:
    """One rank of a tensor-parallel group."""

    rank: int = 0
    world: int = 1

    def split(self, total: int, what: str) -> Span:
        """An equal share. Raises `ConfigError` when `total` does not divide."""
        if total % self.world:
            raise ConfigError(f"tensor_parallel_size={self.world} does not divide {total} {what}; use one of {_divisors(total)}")
        size = total // self.world
        return Span(total, range(self.rank * size, (self.rank + 1) * size))

    def kv_heads(self, total: int) -> Span:
        """A share of the KV heads; where there are fewer heads than ranks, neighbouring ranks hold the same one."""
        if self.world <= total or self.world % total:
            return self.split(total, "KV heads")
        head = self.rank * total // self.world
        return Span(total, range(head, head + 1))

    def vocab(self, total: int) -> Span:
        """A share of the vocabulary, equal but for the last ranks, which may hold less."""
        size = -(-total // self.world)
        return Span(total, range(min(self.rank * size, total), min((self.rank + 1) * size, total)))


def _divisors(total: int) -> str:
    return ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)


def summed(x: torch.Tensor, ranks: Communicator | None) -> torch.Tensor:
    """A rank's share of a sum, and the sum; `ranks` is None for one."""
    return x if ranks is None else ranks.all_reduce(x)
