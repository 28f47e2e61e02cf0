"""Residual addition, norm, product and gated activation with few rows in one Triton kernel; with more rows in kernels of their own, and
with many the product and its activation in one.

The norm's factor is one number a row: the product is made of the weighted row, whose squares are summed on the way, and multiplied by the
factor at the end, so that the row is read once. Each program reads the whole row, which lies in the cache; the first one writes the sum.
Where a program's memory holds whole columns of weights, they wait there for the row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear import GemmFacts
from pagoda.ops.norm_gemm import NormGemmFacts
from pagoda.ops.triton.gated_gemm import MANY, activated, gated_gemm, takes_gated
from pagoda.ops.triton.gemm import Gemm
from pagoda.ops.triton.gemm_routes import Route, joined_route
from pagoda.ops.triton.launch import describes, early, shared_memory
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.pointwise import AddRmsNorm, SiluAndMul
from triton.tools.tensor_descriptor import TensorDescriptor


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
    let_next_start(EARLY)
    wait_for_last(EARLY)
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
        result = activated(result, up)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < columns)


@triton.jit(do_not_specialize=["rows"])
def _whole(x, residual, norm, weight, bias, out, total, rows, columns, eps, offset, x_t, INNER: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Some rows at once: all inner numbers of BLOCK_N columns come through the descriptor `weight` before the kernel in front has ended.
    Columns are the product's left side, which is the wide one."""
    tile = tl.program_id(0)
    m, n, k = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    columns_NK = weight.load([tile * BLOCK_N, 0])
    let_next_start(EARLY)
    wait_for_last(EARLY)
    inside = (m < rows)[:, None] & (k < INNER)[None, :]
    place = m[:, None] * INNER + k[None, :]
    value = tl.load(x + m[:, None] * x_t + k[None, :], mask=inside, other=0.0) + tl.load(residual + place, mask=inside, other=0.0)
    if tile == 0:
        tl.store(total + place, value, mask=inside)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / INNER + eps)
    scale = tl.load(norm + k, mask=k < INNER, other=0.0).to(tl.float32) + offset
    normed = (wide * factor[:, None] * scale[None, :]).to(value.dtype)
    result = tl.dot(columns_NK, tl.trans(normed), input_precision="ieee")
    there = n < columns
    if BIAS:
        result += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(out + m[None, :] * columns + n[:, None], result.to(out.dtype.element_ty), mask=(m < rows)[None, :] & there[:, None])


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
        chosen = self.way(x.shape[0])
        if chosen is not None and len(x) and packed["weight"].is_contiguous() and self.fits(chosen, packed["weight"]):
            return self.joined(packed, x, residual, chosen)
        normed, total = self._add.run({"weight": packed["norm"]}, x, residual)
        if self._act is not None and len(x) >= MANY and self._takes_gated(packed["weight"]):
            return gated_gemm(normed, packed["weight"]), total
        out = self._gemm.run(packed, normed)
        return (out if self._act is None else self._act.run(out)), total

    def way(self, rows: int) -> Route | None:
        """How so many rows go in one kernel; None: one after the other."""
        gemm = self.facts.gemm
        if rows not in self._routes:
            self._routes[rows] = joined_route(rows, gemm.out_features, gemm.in_features, self._act is not None)
        return self._routes[rows]

    def fits(self, chosen: Route, weight: torch.Tensor) -> bool:
        """Whether whole columns, where the way asks for them, find room and a descriptor, whose rows begin at multiples of 16 bytes. They
        are multiplied out of shared memory, which takes 64 at once: fewer would go through registers, all at the same time. Two halves of
        gate and up gained nothing so."""
        if chosen.split == 0:
            return True
        inner, size = self.facts.gemm.in_features, weight.element_size()
        room = (chosen.block_n + 32) * triton.next_power_of_2(inner) * size
        fitting = chosen.block_n >= 64 and inner * size % 16 == 0 and room <= shared_memory(weight.device)
        return self._act is None and fitting and describes(weight.device)

    def _takes_gated(self, weight: torch.Tensor) -> bool:
        gemm = self.facts.gemm
        fitting = not gemm.bias and weight.is_contiguous()
        return fitting and takes_gated(weight.device, weight.dtype, gemm.in_features, self.facts.width)

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
            "INNER": inner, "BLOCK_N": chosen.block_n, "BIAS": bias is not None, "num_warps": chosen.warps, **early(x.device),
        }  # fmt: skip
        grid = (triton.cdiv(columns, chosen.block_n),)
        if chosen.split == 0:
            one_row[grid](
                *tensors[:5], weight, out, total, columns, facts.norm.eps, facts.norm.offset, SCALED=False, GATED=gated,
                BLOCK_K=chosen.block_k, num_stages=chosen.depth(x.element_size()), **common,
            )  # fmt: skip
            return out, total
        _whole[grid](
            *tensors[:3], _described(weight, chosen.block_n), *tensors[4:], rows, columns, facts.norm.eps,
            facts.norm.offset, x.stride(0), BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_K=triton.next_power_of_2(inner), **common,
        )  # fmt: skip
        return out, total


def _described(weight: torch.Tensor, columns: int) -> TensorDescriptor:
    """Whole columns of the product."""
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [columns, triton.next_power_of_2(weight.shape[-1])])
