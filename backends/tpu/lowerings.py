"""Operators that Pagoda needs and torch-xla sends through the host: given a lowering here, once a process."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def lower_what_is_missing() -> Any:
    """Bytes seen as another dtype, and look-ups in sorted rows. Returns what keeps them registered."""
    bitcast = import_module("torch_xla.core.xla_op_registry").register("pagoda_bitcast", _bitcast)
    kinds = import_module("torch_xla.core.xla_builder").Op

    def view_copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype == dtype:
            return x.clone()
        seen: torch.Tensor = bitcast(x, kind=kinds.from_torch_type(dtype), old=x.dtype.itemsize, new=dtype.itemsize)
        return seen

    library = torch.library.Library("aten", "IMPL")
    library.impl("view_copy.dtype", view_copy, "XLA")
    library.impl("searchsorted.Tensor", _searchsorted, "XLA")
    return library


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
