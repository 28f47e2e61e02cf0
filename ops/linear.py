"""Linear layers: `gemm` (dense weights) and `embedding` (row look-up)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel


@dataclass(frozen=True)
class GemmFacts:
    """`x [T, in_features] @ weight [out_features, in_features]ᵀ (+ bias)`, weight in `dtype`."""

    dtype: str
    in_features: int
    out_features: int
    bias: bool = False


class GemmReference(PlainKernel):
    """`run(packed, x)`: x `[T, in_features]` → `[T, out_features]` in x's dtype, accumulated in at least float32."""

    facts: GemmFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, packed["weight"], packed.get("bias"))


@dataclass(frozen=True)
class EmbeddingFacts:
    """Rows of `weight [rows, width]`; ids outside [first, first + rows) give zeros (vocabulary split over ranks).

    `tied`: a head multiplies by the same table.
    """

    dtype: str
    rows: int
    width: int
    first: int = 0
    partial: bool = False
    tied: bool = False


class EmbeddingReference(PlainKernel):
    """`run(packed, ids)`: ids `[T]` int → `[T, width]`."""

    facts: EmbeddingFacts

    def run(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        if not self.facts.partial:
            return F.embedding(ids, packed["weight"])
        local = ids - self.facts.first
        inside = (local >= 0) & (local < self.facts.rows)
        return F.embedding(local.clamp(0, self.facts.rows - 1), packed["weight"]) * inside.unsqueeze(-1)
