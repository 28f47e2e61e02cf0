"""Residual addition, norm, product with float8 weights and gated activation: one kernel with one row, else norms that give float8 rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.triton.fp8_rows import coded_norm
from pagoda.ops.triton.gemm_fp8 import GemmFp8
from pagoda.ops.triton.gemm_routes import Route, joined_fp8_route
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.norm_gemm import one_row
from pagoda.ops.triton.pointwise import AddRmsNorm, SiluAndMul


class NormGemmFp8(PlainKernel):
    """`run(packed, x, residual)`, as in `ops.norm_gemm.NormGemmReference` with SiLU and a `gemm_fp8`."""

    facts: NormGemmFacts

    def __init__(self, facts: NormGemmFacts) -> None:
        super().__init__(facts)
        assert isinstance(facts.gemm, GemmFp8Facts)
        self._product, self._add, self._gemm = facts.gemm, AddRmsNorm(facts.norm), GemmFp8(facts.gemm)
        self._act = SiluAndMul(facts.activation) if facts.activation is not None else None

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, product = x.shape[0], self._product
        way = (
            joined_fp8_route(product.out_features, product.in_features, self._act is not None) if rows == 1 and not product.block else None
        )
        if way is not None:
            return self.joined(packed, x, residual, way)
        normed, total = self._normed(packed, x, residual)
        return (normed if self._act is None else self._act.run(normed)), total

    def _normed(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.shape[0]
        if rows and self._gemm.takes_codes(rows):
            coded, total = coded_norm(self.facts.norm, packed["norm"], x, residual, self._product.block)
            return self._gemm.coded_rows(packed, coded, x.dtype), total
        normed, total = self._add.run({"weight": packed["norm"]}, x, residual)
        return self._gemm.run(packed, normed), total

    def joined(self, packed: Any, x: torch.Tensor, residual: torch.Tensor, way: Route) -> tuple[torch.Tensor, torch.Tensor]:
        """One row in one kernel, cut as `way` says."""
        facts, gated = self.facts, self._act is not None
        x, residual = x if x.stride(-1) == 1 else x.contiguous(), residual.contiguous()
        out = torch.empty(1, facts.width, dtype=x.dtype, device=x.device)
        total = torch.empty_like(residual)
        weight, bias = packed["weight"], packed.get("bias")
        one_row[(triton.cdiv(facts.width, way.block_n),)](
            x, residual, packed["norm"], weight, weight if bias is None else bias, packed["scale"], out, total, facts.width,
            facts.norm.eps, facts.norm.offset, INNER=self._product.in_features, BLOCK_N=way.block_n, BLOCK_K=way.block_k,
            BIAS=bias is not None, GATED=gated, SCALED=True, num_warps=way.warps, num_stages=way.depth(x.element_size()),
            **early(x.device),
        )  # fmt: skip
        return out, total
