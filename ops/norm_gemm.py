"""`norm_gemm`: residual addition, norm, linear layer and, where it follows, the gated activation, in one primitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts, GatedActivationReference
from pagoda.ops.linear import GemmFacts, GemmReference
from pagoda.ops.linear_fp8 import GemmFp8Facts, GemmFp8Reference
from pagoda.ops.norm import AddRmsNormReference, NormFacts


@dataclass(frozen=True)
class NormGemmFacts:
    """What it is made of; all of one dtype, `norm.width` = `gemm.in_features`.

    Attributes:
        norm: RMS norm. gemm: the product, `gemm` or `gemm_fp8`. activation: gate and up are the product's two halves, None: no activation.
    """

    norm: NormFacts
    gemm: GemmFacts | GemmFp8Facts
    activation: ActivationFacts | None = None

    @property
    def dtype(self) -> str:
        return self.gemm.dtype

    @property
    def width(self) -> int:
        """Numbers of a row of the result."""
        return self.gemm.out_features // (2 if self.activation is not None else 1)


class NormGemmReference(PlainKernel):
    """`run(packed, x, residual)` → (act(norm(x + residual) @ weightᵀ + bias) `[T, width]`, x + residual `[T, in_features]`).

    x, residual `[T, in_features]`; `residual` may be overwritten. Packs `norm` `[in_features]`, and what the product packs.
    """

    facts: NormGemmFacts

    def __init__(self, facts: NormGemmFacts) -> None:
        super().__init__(facts)
        self._norm = AddRmsNormReference(facts.norm)
        self._gemm = GemmFp8Reference(facts.gemm) if isinstance(facts.gemm, GemmFp8Facts) else GemmReference(facts.gemm)
        self._act = GatedActivationReference(facts.activation) if facts.activation is not None else None

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self._norm.run({"weight": packed.get("norm")}, x, residual)
        out = self._gemm.run(packed, normed)
        return (out if self._act is None else self._act.run(out)), total
