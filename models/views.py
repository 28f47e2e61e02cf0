"""Stored tensors made of other stored tensors: parts, joins, stacks, permutations. Nothing is read before `read`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.quant.format import StoredTensor

Index = tuple[slice, ...]


@dataclass(frozen=True)
class _View:
    """Of one tensor, with its shape and dtype where a view says nothing else."""

    name: str
    base: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> str:
        return self.base.dtype


@dataclass(frozen=True)
class Renamed(_View):
    """The same tensor under another name."""

    def read(self, index: Index = ()) -> torch.Tensor:
        return self.base.read(index)


@dataclass(frozen=True)
class Part(_View):
    """`base[start:stop]` along `dim`."""

    dim: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return _replaced(self.base.shape, self.dim, self.stop - self.start)

    def read(self, index: Index = ()) -> torch.Tensor:
        full = _full(index, self.shape)
        start, stop = full[self.dim]
        full[self.dim] = (start + self.start, stop + self.start)
        return self.base.read(tuple(slice(*bounds) for bounds in full))


@dataclass(frozen=True)
class Joined:
    """`bases` one after the other along `dim`."""

    name: str
    bases: tuple[StoredTensor, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        _check_alike(self.name, [_replaced(base.shape, self.dim, 0) for base in self.bases])
        return _replaced(self.bases[0].shape, self.dim, sum(base.shape[self.dim] for base in self.bases))

    @property
    def dtype(self) -> str:
        return _same_dtype(self.name, self.bases)

    def read(self, index: Index = ()) -> torch.Tensor:
        full, offset = _full(index, self.shape), 0
        pieces: list[torch.Tensor] = []
        first, last = full[self.dim]
        for base in self.bases:
            size = base.shape[self.dim]
            start, stop = max(first - offset, 0), min(last - offset, size)
            if start < stop or (not pieces and offset + size >= last):
                full[self.dim] = (start, max(start, stop))
                pieces.append(base.read(tuple(slice(*bounds) for bounds in full)))
            offset += size
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


@dataclass(frozen=True)
class Stacked:
    """`bases` along a new first dimension."""

    name: str
    bases: tuple[StoredTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        _check_alike(self.name, [base.shape for base in self.bases])
        return (len(self.bases), *self.bases[0].shape)

    @property
    def dtype(self) -> str:
        return _same_dtype(self.name, self.bases)

    def read(self, index: Index = ()) -> torch.Tensor:
        chosen = self.bases[index[0]] if index else self.bases
        if not chosen:
            return self.bases[0].read(tuple(index[1:])).unsqueeze(0)[:0]
        return torch.stack([base.read(tuple(index[1:])) for base in chosen])


@dataclass(frozen=True)
class Unstacked(_View):
    """`base[place]`."""

    place: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape[1:]

    def read(self, index: Index = ()) -> torch.Tensor:
        return self.base.read((slice(self.place, self.place + 1), *index))[0]


@dataclass(frozen=True)
class Transposed(_View):
    """The last two dimensions exchanged."""

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, rows, columns = self.base.shape
        return (*outer, columns, rows)

    def read(self, index: Index = ()) -> torch.Tensor:
        if not hasattr(torch, self.dtype):
            raise CheckpointError(f"{self.name} is stored transposed in blocks of {self.dtype}, which cannot be turned; use a plain one")
        full = _full(index, self.shape)
        full[-1], full[-2] = full[-2], full[-1]
        return self.base.read(tuple(slice(*bounds) for bounds in full)).transpose(-1, -2)


def transposed(tensor: StoredTensor) -> StoredTensor:
    """The last two dimensions exchanged; turned twice is not turned, whatever the format."""
    inner = tensor
    while isinstance(inner, Renamed):
        inner = inner.base
    return inner.base if isinstance(inner, Transposed) else Transposed(tensor.name, tensor)


@dataclass(frozen=True)
class Reordered(_View):
    """Dimension `dim` seen as `view`, its axes exchanged to `order`, and flattened again."""

    view: tuple[int, ...]
    order: tuple[int, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        if prod(self.view) != self.base.shape[self.dim]:
            raise CheckpointError(
                f"{self.name}: {prod(self.view)} = {self.view} rows were expected, {self.base.shape[self.dim]} are stored"
            )
        return self.base.shape

    def read(self, index: Index = ()) -> torch.Tensor:
        full = _full(index, self.shape)
        order = torch.arange(self.shape[self.dim]).view(self.view).permute(self.order).reshape(-1)
        wanted = order[slice(*full[self.dim])]
        start, stop = (int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else (0, 0)
        full[self.dim] = (start, stop)
        # Trailing slices that take everything are left out: rows of block types are then read whole.
        return self.base.read(tuple(slice(*bounds) for bounds in full)[: max(self.dim + 1, len(index))]).index_select(
            self.dim, wanted - start
        )


@dataclass(frozen=True)
class Shifted(_View):
    """`base + value`."""

    value: float

    def read(self, index: Index = ()) -> torch.Tensor:
        return self.base.read(index) + self.value


@dataclass(frozen=True)
class UnitRows(_View):
    """`base`, a matrix, with rows of length one."""

    def read(self, index: Index = ()) -> torch.Tensor:
        rows = self.base.read(index[:1])
        unit = torch.nn.functional.normalize(rows.float(), dim=-1).to(rows.dtype)
        return unit[(slice(None), *index[1:])]


def _full(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    padded = (*index, *(slice(None),) * (len(shape) - len(index)))
    return [part.indices(size)[:2] for part, size in zip(padded, shape, strict=True)]


def _replaced(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _check_alike(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    if len(set(shapes)) > 1:
        raise CheckpointError(
            f"{name} is made of tensors of shapes {sorted(set(shapes))}, which do not fit together; fetch the model again"
        )


def _same_dtype(name: str, bases: Sequence[StoredTensor]) -> str:
    dtypes = sorted({base.dtype for base in bases})
    if len(dtypes) > 1:
        raise CheckpointError(f"{name} is made of tensors stored in different formats ({', '.join(dtypes)}), which cannot be joined")
    return dtypes[0]


@dataclass(frozen=True)
class Zeros(_View):
    """Zeros, one for each row of `base`."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape[:1]

    def read(self, index: Index = ()) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype))[tuple(index)]
