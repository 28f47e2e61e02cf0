"""What all families' cases share: drawing inputs, splitting batches into rows, and the tolerance rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from pagoda.ops.op import DTYPE_EPS, Case, Part

ROWS = (0, 1, 2, 15, 17, 33)
"""Row counts around the block sizes that kernels are fond of."""


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def draw(gen: torch.Generator, *shape: int, dtype: str = "float32", scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, already rounded to `dtype`: oracle and kernel see the same inputs."""
    return (torch.randn(shape, generator=gen) * scale).to(dtype_of(dtype))


def strided(x: torch.Tensor, gap: int = 8) -> torch.Tensor:
    """The same numbers as a view whose rows are `gap` elements apart; NaN lies between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def tolerance(dtype: str, reduction: int = 1, roundings: int = 1, gain: float = 1.0) -> float:
    """Largest error allowed, relative to the largest true number.

    `roundings` results are rounded to `dtype`; sums of `reduction` terms are kept in float32, whose errors grow as a random walk;
    `gain` is how much the primitive amplifies an error of such a sum.
    """
    wide = min(DTYPE_EPS[dtype], DTYPE_EPS["float32"])
    return roundings * DTYPE_EPS[dtype] + 4 * wide * (1 + math.sqrt(reduction)) * max(1.0, gain)


def by_rows(*indices: int) -> Callable[[Case], Iterator[Part]]:
    """A splitter for primitives whose arguments `indices` have one row per row of the output; none, no parts."""

    def split(case: Case) -> Iterator[Part]:
        if not indices:
            return
        rows = case.args[indices[0]].shape[0]
        for row in sorted({0, rows // 2, rows - 1}) if rows else ():
            piece = slice(row, row + 1)
            args = tuple(arg[piece] if i in indices and arg is not None else arg for i, arg in enumerate(case.args))
            yield Part(replace(case, label=f"{case.label}, row {row} alone", args=args), piece)

    return split
