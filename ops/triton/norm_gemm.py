"""Residual addition, norm, product and gated activation with few rows in one Triton kernel; with more rows in kernels of their own.

The norm's factor is one number a row: the product is made of the weighted row, whose squares are summed on the way, and multiplied by the
factor at the end, so that the row is read once. Each program reads the whole row, which lies in the cache; the first one writes the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear import GemmFacts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.triton.gemm import Gemm
from pagoda.ops.triton.gemm_routes import Route, joined_route
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.pointwise import AddRmsNorm, SiluAndMul
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _activated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def one_row(x, residual, norm, weight, bias, scale, out, total, columns, eps, offset, INNER: tl.constexpr, BLOCK_N: tl.constexpr,
            BLOCK_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One row without the matrix units: a program multiplies some whole rows of weights. SCALED: each of them has a factor."""
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = weight + n.to(tl.int64)[:, None] * INNER
    second = weight + (n.to(tl.int64) + columns)[:, None] * INNER
    there = (n < columns)[:, None]
    # Weights are nobody's result: the first of them are under way before the kernel in front has ended.
    one = tl.load(first + k[None, :], mask=there & (k < INNER)[None, :], other=0.0)
    two = one
    if GATED:
        two = tl.load(second + k[None, :], mask=there & (k < INNER)[None, :], other=0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inside = start + k < INNER
        value = tl.load(x + start + k, mask=inside, other=0.0) + tl.load(residual + start + k, mask=inside, other=0.0)
        if tile == 0:
            tl.store(total + start + k, value, mask=inside)
        wide = value.to(tl.float32)
        squares += wide * wide
        wide = wide * (tl.load(norm + start + k, mask=inside, other=0.0).to(tl.float32) + offset)
        later = start + BLOCK_K + k
        ahead = there & (later < INNER)[None, :]
        following = tl.load(first + later[None, :], mask=ahead, other=0.0)
        acc += one.to(tl.float32) * wide[None, :]
        one = following
        if GATED:
            following = tl.load(second + later[None, :], mask=ahead, other=0.0)
            acc_up += two.to(tl.float32) * wide[None, :]
            two = following
    factor = tl.rsqrt(tl.sum(squares, 0) / INNER + eps)
    result = tl.sum(acc, 1) * factor
    if SCALED:
        result *= tl.load(scale + n, mask=n < columns, other=0.0)
    if BIAS:
        result += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, 1) * factor
        if SCALED:
            up *= tl.load(scale + columns + n, mask=n < columns, other=0.0)
        if BIAS:
            up += tl.load(bias + columns + n, mask=n < columns, other=0.0).to(tl.float32)
        result = _activated(result, up)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < columns)


@triton.jit(do_not_specialize=["rows"])
def _rows(x, residual, norm, weight, bias, out, total, rows, columns, eps, offset, x_t, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
          BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """Some rows with the matrix units: a program takes all of them and BLOCK_N columns."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    m, n, k = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first = weight + n.to(tl.int64)[None, :] * INNER + k[:, None]
    second = weight + (n.to(tl.int64) + columns)[None, :] * INNER + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_M], tl.float32)
    valid, there = (m < rows)[:, None], (n < columns)[None, :]
    for start in range(0, INNER, BLOCK_K):
        inside = (start + k < INNER)[None, :]
        mask_a, mask_b = (valid, there) if EVEN_K else (valid & inside, there & tl.trans(inside))
        place = m[:, None] * INNER + start + k[None, :]
        value = tl.load(x + m[:, None] * x_t + start + k[None, :], mask=mask_a, other=0.0)
        value += tl.load(residual + place, mask=mask_a, other=0.0)
        if tile == 0:
            tl.store(total + place, value, mask=mask_a)
        wide = value.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        weights = tl.load(norm + start + k, mask=start + k < INNER, other=0.0).to(tl.float32) + offset
        left = (wide * weights[None, :]).to(value.dtype)
        acc = tl.dot(left, tl.load(first + start, mask=mask_b, other=0.0), acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(left, tl.load(second + start, mask=mask_b, other=0.0), acc_up, input_precision="ieee")
    factor = tl.rsqrt(squares / INNER + eps)[:, None]
    result = acc * factor
    if BIAS:
        result += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = acc_up * factor
        if BIAS:
            up += tl.load(bias + columns + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        result = _activated(result, up)
    tl.store(out + m[:, None] * columns + n[None, :], result.to(out.dtype.element_ty), mask=valid & there)


class NormGemm(PlainKernel):
    """`run(packed, x, residual)`, as in `ops.norm_gemm.NormGemmReference` with SiLU."""

    facts: NormGemmFacts

    def __init__(self, facts: NormGemmFacts) -> None:
        super().__init__(facts)
        assert isinstance(facts.gemm, GemmFacts)
        self._add, self._gemm = AddRmsNorm(facts.norm), Gemm(facts.gemm)
        self._act = SiluAndMul(facts.activation) if facts.activation is not None else None
        self._routes: dict[int, Route | None] = {}

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, gemm = x.shape[0], self.facts.gemm
        if rows not in self._routes:
            self._routes[rows] = joined_route(rows, gemm.out_features, gemm.in_features, self._act is not None)
        chosen = self._routes[rows]
        if chosen is not None and rows and packed["weight"].is_contiguous():
            return self.joined(packed, x, residual, chosen)
        normed, total = self._add.run({"weight": packed["norm"]}, x, residual)
        out = self._gemm.run(packed, normed)
        return (out if self._act is None else self._act.run(out)), total

    def joined(self, packed: Any, x: torch.Tensor, residual: torch.Tensor, chosen: Route) -> tuple[torch.Tensor, torch.Tensor]:
        """In one kernel, cut as `chosen` says."""
        facts, gated = self.facts, self._act is not None
        x, residual = x if x.stride(-1) == 1 else x.contiguous(), residual.contiguous()
        rows, inner, columns = x.shape[0], facts.gemm.in_features, facts.width
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        total = torch.empty_like(residual)
        weight, bias = packed["weight"], packed.get("bias")
        tensors = (x, residual, packed["norm"], weight, weight if bias is None else bias, out, total)
        common = {
            "INNER": inner, "BLOCK_N": chosen.block_n, "BLOCK_K": chosen.block_k, "BIAS": bias is not None, "GATED": gated,
            "num_warps": chosen.warps, "num_stages": chosen.depth(x.element_size()), **early(x.device),
        }  # fmt: skip
        grid = (triton.cdiv(columns, chosen.block_n),)
        if chosen.split == 0:
            one_row[grid](*tensors[:5], weight, out, total, columns, facts.norm.eps, facts.norm.offset, SCALED=False, **common)
            return out, total
        block_m = max(16, triton.next_power_of_2(rows))
        # Rows, what is added to them, and weights, those of gate and of up.
        stage = (2 * block_m + (2 if gated else 1) * chosen.block_n) * chosen.block_k * x.element_size()
        common["num_stages"] = fitting_stages(x.device, common["num_stages"], stage)
        _rows[grid](
            *tensors, rows, columns, facts.norm.eps, facts.norm.offset, x.stride(0), BLOCK_M=block_m,
            EVEN_K=inner % chosen.block_k == 0, **common,
        )  # fmt: skip
        return out, total
