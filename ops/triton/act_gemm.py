"""Gated activation and product with float8 weights: the activation gives float8 rows where the product wants them."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.act_gemm import ActGemmFacts
from pagoda.ops.triton.fp8_rows import coded_silu
from pagoda.ops.triton.gemm_fp8 import GemmFp8
from pagoda.ops.triton.pointwise import SiluAndMul


class ActGemm(PlainKernel):
    """`run(packed, x)`, as in `ops.act_gemm.ActGemmReference` with SiLU."""

    facts: ActGemmFacts

    def __init__(self, facts: ActGemmFacts) -> None:
        super().__init__(facts)
        self._act, self._gemm = SiluAndMul(facts.activation), GemmFp8(facts.gemm)

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] and self._gemm.takes_codes(x.shape[0]):
            return self._gemm.coded_rows(packed, coded_silu(x if x.stride(-1) == 1 else x.contiguous(), self.facts.gemm.block), x.dtype)
        return self._gemm.run(packed, self._act.run(x))
