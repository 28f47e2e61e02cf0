"""`act_gemm`: the gated activation and the linear layer that reads it, in one primitive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts, GatedActivationReference
from pagoda.ops.linear_fp8 import GemmFp8Facts, GemmFp8Reference


@dataclass(frozen=True)
class ActGemmFacts:
    """Of one dtype; the product has float8 weights, whose kernels may make the activated rows float8 on their way."""

    activation: ActivationFacts
    gemm: GemmFp8Facts

    @property
    def dtype(self) -> str:
        return self.gemm.dtype


class ActGemmReference(PlainKernel):
    """`run(packed, x)`: x `[T, 2 · in_features]`, gate and up side by side → act(gate) · up @ weightᵀ + bias, `[T, out_features]`.

    Packs what the product packs.
    """

    facts: ActGemmFacts

    def __init__(self, facts: ActGemmFacts) -> None:
        super().__init__(facts)
        self._act, self._gemm = GatedActivationReference(facts.activation), GemmFp8Reference(facts.gemm)

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.run(packed, self._act.run(x))
