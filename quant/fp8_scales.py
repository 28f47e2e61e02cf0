"""Scales of float8 weights as checkpoints store them: found, read, and multiplied by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pagoda.quant.format import StoredTensor

SCALES = ("weight_scale", "weight_scale_inv")
"""What checkpoints call scales; both are multiplied by."""


@dataclass(frozen=True)
class Decoded:
    """A `StoredTensor`: codes `[…, N, K]` times their scales, as plain numbers. `block`: side of a scale's square; 0: no squares."""

    name: str
    codes: StoredTensor
    scale: StoredTensor
    block: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> str:
        return "float32"

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        numbers = self.codes.read(index).float()
        outer = tuple(index[: len(self.shape) - 2])
        if not self.block:
            rows = tuple(index[len(outer) : len(outer) + 1])
            return numbers * rows_of(self.scale, self.shape, (*outer, *rows)).unsqueeze(-1)
        full = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        places = [torch.arange(size)[span] // self.block for span, size in zip(full[-2:], self.shape[-2:], strict=True)]
        scales = self.scale.read(outer).float()
        return numbers * scales.index_select(-2, places[0]).index_select(-1, places[1])


def scale_of(tensors: Mapping[str, StoredTensor]) -> tuple[str, StoredTensor]:
    return next(((name, tensors[name]) for name in SCALES if name in tensors), ("", None))  # type: ignore[arg-type,return-value]


def rows_of(scale: StoredTensor, shape: tuple[int, ...], index: tuple[slice, ...]) -> torch.Tensor:
    """Scales of rows in `index`, `[…, rows]`, of a matrix, or a stack of them, of this shape."""
    numbers, (*outer, rows, _) = scale.read().float(), shape
    whole = numbers.reshape(*outer, -1) if numbers.numel() > 1 else numbers.reshape(*(1,) * len(outer), 1)
    return whole.expand(*outer, rows)[index]


def squares(scale: StoredTensor, rows: range, columns: range, block: int) -> torch.Tensor:
    index = tuple(slice(span.start // block, -(-span.stop // block)) for span in (rows, columns))
    return scale.read(index).float()
