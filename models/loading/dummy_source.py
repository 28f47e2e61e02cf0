"""Random weights of the right scale, for benchmarks and for models whose checkpoint is not here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from pagoda.models.weights import Naming
from pagoda.quant.format import StoredTensor

POOL = 4_194_301
"""Numbers drawn once; a prime, so that no two rows of a matrix see the same stretch of them."""


class DummySource:
    """A `WeightSource` that draws tensors instead of reading them.

    Numbers depend on seed, name and position alone, so that ranks and slices agree. Matrices have variance 1 / inputs, which keeps
    activations and logits at the scale of one; weights that are vectors (of norms) are ones, other vectors small.

    Args:
        shapes: (name, shape, dtype name) of every tensor.
        seed: two seeds give unrelated weights.
    """

    def __init__(self, shapes: Iterable[tuple[str, tuple[int, ...], str]], seed: int = 0, naming: Naming = "pagoda") -> None:
        self.naming: Naming = naming
        pool = _Pool(seed)
        self.tensors: Mapping[str, StoredTensor] = {name: DummyTensor(name, shape, dtype, pool) for name, shape, dtype in shapes}

    def close(self) -> None:
        """Nothing is held."""


class _Pool:
    """Uniform numbers of variance one, in each dtype asked for; `take` repeats them without end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._numbers: dict[torch.dtype, torch.Tensor] = {}

    def take(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        pool = self._of(dtype)
        out = torch.empty(count, dtype=dtype)
        done, position = 0, start % POOL
        while done < count:
            step = min(POOL - position, count - done)
            out[done : done + step] = pool[position : position + step]
            done, position = done + step, 0
        return out

    def _of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._numbers:
            generator = torch.Generator().manual_seed(self.seed)
            uniform = torch.rand(POOL, generator=generator).sub_(0.5).mul_(12**0.5)
            self._numbers[dtype] = uniform.to(dtype)
        return self._numbers[dtype]


@dataclass(frozen=True)
class DummyTensor:
    """One drawn tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pool: _Pool

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """See `StoredTensor.read`; draws the leading slice only."""
        dtype = getattr(torch, self.dtype)
        if not self.shape:
            return torch.ones((), dtype=dtype)
        start, stop, _ = (index[0] if index else slice(None)).indices(self.shape[0])
        shape = (max(0, stop - start), *self.shape[1:])
        if self._is_norm:
            return torch.ones(shape, dtype=dtype)
        inner = prod(self.shape[1:])
        offset = zlib.crc32(self.name.encode()) + start * inner
        return self.pool.take(offset, prod(shape), dtype).mul_(self._scale).view(shape)[(slice(None), *index[1:])]

    @property
    def _is_norm(self) -> bool:
        return len(self.shape) == 1 and self.name.endswith("weight")

    @property
    def _scale(self) -> float:
        return self.shape[-1] ** -0.5 if len(self.shape) > 1 else 0.02
