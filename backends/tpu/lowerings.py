"""Operators that Pagoda needs and torch-xla sends through the host: given a lowering here, once a process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

FLOAT8 = {torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2"}
"""Names of dtypes that torch-xla's builder has none for."""


@cache
def lower_what_is_missing() -> Any:
    """Bytes seen as another dtype, look-ups of no rows and in sorted rows, shifts, any strides. Returns what keeps them registered."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that what was there is replaced
        library.impl("view_copy.dtype", _bytes_seen(), "XLA")
        library.impl("searchsorted.Tensor", _searchsorted, "XLA")
        library.impl("gelu", _gelu, "XLA")
        library.impl("gather", _gather(), "XLA", with_keyset=True)
        library.impl("as_strided_copy", _strided, "XLA")
        library.impl("as_strided_scatter", _into_strided, "XLA")
        library.impl("__rshift__.Scalar", _right_shift(), "XLA")
        library.impl("__rshift__.Tensor", _right_shift(), "XLA")
        library.impl("bitwise_left_shift.Scalar_Tensor", _number_left, "XLA")
    return library


def _registered(name: str, lowering: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    made: Callable[..., torch.Tensor] = import_module("torch_xla.core.xla_op_registry").register(name, lowering)
    return made


def _bytes_seen() -> Callable[..., torch.Tensor]:
    bitcast, kinds = _registered("pagoda_bitcast", _bitcast), import_module("torch_xla.core.xla_builder").Op.from_torch_type

    def view_copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype == dtype:
            return x.clone()
        if torch.bool in (x.dtype, dtype):  # a byte each, which XLA does not see as eight bits
            return x.to(dtype) if x.dtype == torch.bool else x != 0
        return bitcast(x, kind=FLOAT8.get(dtype) or kinds(dtype), old=x.dtype.itemsize, new=dtype.itemsize)

    return view_copy


def _gather() -> Callable[..., torch.Tensor]:
    own = torch.library.get_kernel("aten::gather", "XLA")

    def gather(keys: Any, x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> torch.Tensor:
        if not index.numel():  # XLA's look-up wants a row at least
            return x.new_empty(index.shape)
        found: torch.Tensor = own.call_boxed(keys, x, dim, index, sparse_grad=sparse_grad)
        return found

    return gather


def _right_shift() -> Callable[..., torch.Tensor]:
    divided = _registered("pagoda_divide", lambda x, y: x / y)

    def shift(x: torch.Tensor, places: torch.Tensor | int) -> torch.Tensor:
        """As torch-xla divides to shift, negative numbers were rounded up: here they are turned around first."""
        negative = -(x < 0).to(x.dtype)
        return divided(*torch.broadcast_tensors(x ^ negative, _power(x, places))) ^ negative

    return shift


def _number_left(number: int, places: torch.Tensor) -> torch.Tensor:
    """A number takes the dtype of its places; torch-xla let it keep its own."""
    return torch.full_like(places, number) << places


def _power(x: torch.Tensor, places: torch.Tensor | int) -> torch.Tensor:
    """Two to the power of `places` in x's dtype: by products, as XLA makes of a division by its own power a product with one of a negative
    exponent, which among integers is 0."""
    if isinstance(places, int):
        return torch.full((), _wrapped(1 << places, x.dtype), dtype=x.dtype, device=x.device)
    power = torch.ones_like(places, dtype=x.dtype)
    for bit in range((8 * x.dtype.itemsize - 1).bit_length()):
        factor = torch.full_like(power, _wrapped(1 << (1 << bit), x.dtype))
        power = power * torch.where((places & (1 << bit)) != 0, factor, torch.ones_like(power))
    return power


def _wrapped(number: int, dtype: torch.dtype) -> int:
    """As an integer of `dtype` has it."""
    bits, lowest = 8 * dtype.itemsize, torch.iinfo(dtype).min
    return (number - lowest) % (1 << bits) + lowest


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """By forms that vanish where x is far below 0. XLA's `erf` and `tanh` miss -1 there by a bit, which x multiplies."""
    wide = x if x.dtype == torch.float64 else x.float()
    if approximate == "none":
        return (0.5 * wide * torch.erfc(-math.sqrt(0.5) * wide)).to(x.dtype)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide / (1 + torch.exp(-2 * inner))).to(x.dtype)


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
