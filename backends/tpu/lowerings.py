"""Operators that Pagoda needs and torch-xla sends through the host: given a lowering here, once a process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def lower_what_is_missing() -> Any:
    """Bytes seen as another dtype, look-ups in sorted rows, and strides of any kind. Returns what keeps them registered."""
    bitcast = import_module("torch_xla.core.xla_op_registry").register("pagoda_bitcast", _bitcast)
    kinds = import_module("torch_xla.core.xla_builder").Op

    def view_copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype == dtype:
            return x.clone()
        if torch.bool in (x.dtype, dtype):  # a byte each, which XLA does not see as eight bits
            return x.to(dtype) if x.dtype == torch.bool else x != 0
        seen: torch.Tensor = bitcast(x, kind=kinds.from_torch_type(dtype), old=x.dtype.itemsize, new=dtype.itemsize)
        return seen

    library = torch.library.Library("aten", "IMPL")
    library.impl("view_copy.dtype", view_copy, "XLA")
    library.impl("searchsorted.Tensor", _searchsorted, "XLA")
    divided = import_module("torch_xla.core.xla_op_registry").register("pagoda_divide", lambda x, y: x / y)

    def shift(x: torch.Tensor, places: torch.Tensor | int) -> torch.Tensor:
        """As torch-xla divides to shift, negative numbers were rounded up: here they are turned around first."""
        negative = -(x < 0).to(x.dtype)
        power = torch.ones((), dtype=x.dtype, device=x.device) << places
        found: torch.Tensor = divided(*torch.broadcast_tensors(x ^ negative, power))
        return found ^ negative

    library.impl("__rshift__.Scalar", shift, "XLA")
    library.impl("__rshift__.Tensor", shift, "XLA")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that what was there is replaced
        library.impl("as_strided_copy", _strided, "XLA")
        library.impl("as_strided_scatter", _into_strided, "XLA")
    return library


def _places(size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device) -> torch.Tensor:
    places = torch.full((), offset, dtype=torch.int64, device=device)
    for count, step in zip(size, stride, strict=True):
        places = places.unsqueeze(-1) + torch.arange(count, device=device) * step
    return places.reshape(-1)


def _strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> torch.Tensor:
    return x.reshape(-1).index_select(0, _places(size, stride, storage_offset or 0, x.device)).reshape(list(size))


def _into_strided(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    places = _places(size, stride, storage_offset or 0, x.device)
    return x.reshape(-1).scatter(0, places, source.reshape(-1)).reshape(x.shape)


def _bitcast(x: Any, kind: Any, old: int, new: int) -> Any:
    """The bytes of `x` as elements of `kind`; the last dimension shrinks or grows as `Tensor.view(dtype)` has it."""
    *outer, last = x.shape().sizes
    if old == new:
        return x.bitcast(kind)
    if old > new:
        return x.bitcast(kind).reshape([*outer, last * old // new])
    ratio = new // old
    return x.reshape([*outer, last // ratio, ratio]).bitcast(kind)


def _searchsorted(
    sequence: torch.Tensor, values: torch.Tensor, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """By counting, which needs no loop: rows here are as long as a step has requests."""
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    row = sequence.unsqueeze(-2) if sequence.dim() > 1 else sequence
    before = row <= values.unsqueeze(-1) if right or side == "right" else row < values.unsqueeze(-1)
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)
