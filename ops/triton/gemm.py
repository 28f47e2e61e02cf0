"""Products with few rows in Triton, where reading the weights is all the work; the number of rows decides which way, by a measured table.

One row: a program multiplies some whole rows of weights, held in registers, without the matrix units. More rows: tiles for the matrix
units, with the inner dimension split over programs; the last of a tile's programs to arrive adds up the parts, in fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear import GemmFacts
from pagoda.ops.triton.gemm_routes import Route, route
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.order import let_next_start, wait_for_last


@triton.jit(do_not_specialize=["turns"])
def _vector(x, weight, bias, out, columns, inner, turns, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
            BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """`turns` tiles of BLOCK_N columns, one after the other; the next weights are always under way."""
    n = tl.program_id(0) * turns * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = weight + n.to(tl.int64)[:, None] * inner
    # Weights are nobody's result: the first of them are under way before the kernel in front has ended.
    tile = tl.load(rows + k[None, :], mask=(n < columns)[:, None] & (k < inner)[None, :], other=0.0)
    let_next_start(EARLY)
    wait_for_last(EARLY)
    for turn in range(turns):
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, inner, BLOCK_K):
            if EVEN_K:
                values = tl.load(x + start + k)
            else:
                values = tl.load(x + start + k, mask=start + k < inner, other=0.0)
            ends = start + BLOCK_K >= inner
            later, column = tl.where(ends, 0, start + BLOCK_K), n + tl.where(ends, BLOCK_N, 0)
            there = (column < columns) & (tl.where(ends, turn + 1, turn) < turns)
            ahead = rows + tl.where(ends, BLOCK_N * inner, later) + k[None, :]
            following = tl.load(ahead, mask=there[:, None] & (later + k < inner)[None, :], other=0.0)
            acc += tile.to(tl.float32) * values.to(tl.float32)[None, :]
            tile = following
        result = tl.sum(acc, 1)
        if BIAS:
            result += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)
        tl.store(out + n, result.to(out.dtype.element_ty), mask=n < columns)
        n += BLOCK_N
        rows += BLOCK_N * inner


@triton.jit(do_not_specialize=["rows"])
def _tiles(x, weight, bias, out, parts, arrived, rows, columns, inner, splits, x_t, out_t, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    tile, split = tl.program_id(0), tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    share = tl.cdiv(tl.cdiv(inner, BLOCK_K), splits) * BLOCK_K
    low = split * share
    high = tl.minimum(low + share, inner)
    a = x + m[:, None] * x_t + k[None, :]
    b = weight + n.to(tl.int64)[None, :] * inner + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(low, high, BLOCK_K):
        mask_a, mask_b = (m < rows)[:, None], (n < columns)[None, :]
        if not EVEN_K:
            mask_a = mask_a & (start + k < inner)[None, :]
            mask_b = mask_b & (start + k < inner)[:, None]
        left = tl.load(a + start, mask=mask_a, other=0.0)
        right = tl.load(b + start, mask=mask_b, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    last = True
    if SPLIT:
        part = parts + tile * (splits * BLOCK_M * BLOCK_N) + m[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(part + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(arrived + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(splits):
                acc += tl.load(part + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if last:
        if BIAS:
            acc += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(out + m[:, None] * out_t + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


class Gemm(PlainKernel):
    """`run(packed, x)`, as in `ops.linear.GemmReference`; torch's product where the table has no better way."""

    facts: GemmFacts

    def __init__(self, facts: GemmFacts) -> None:
        super().__init__(facts)
        self._routes: dict[int, Route | None] = {}
        self._arrived: torch.Tensor | None = None

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        rows, weight, bias = x.shape[0], packed["weight"], packed.get("bias")
        if rows not in self._routes:
            self._routes[rows] = route(rows, self.facts.out_features, self.facts.in_features)
        chosen = self._routes[rows]
        if chosen is None or rows == 0 or not weight.is_contiguous():
            return F.linear(x, weight, bias)
        if self._arrived is None:
            # One for all layers of this shape: they run one after the other, and each leaves zeros.
            self._arrived = torch.zeros(triton.cdiv(self.facts.out_features, 16), dtype=torch.int32, device=x.device)
        return multiply(x, weight, bias, self._arrived, chosen)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, arrived: torch.Tensor, chosen: Route) -> torch.Tensor:
    """`x @ weightᵀ + bias` in the way that `chosen` says. `arrived`: a zero for each tile, int32, zeros again afterwards."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, (columns, inner) = x.shape[0], weight.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(columns, chosen.block_n)
    common = {
        "BLOCK_N": chosen.block_n, "BLOCK_K": chosen.block_k, "EVEN_K": inner % chosen.block_k == 0, "BIAS": bias is not None,
        "num_warps": chosen.warps, "num_stages": chosen.depth(x.element_size()), **early(x.device),
    }  # fmt: skip
    if chosen.split == 0:
        _vector[(triton.cdiv(tiles, chosen.turns),)](
            x, weight, weight if bias is None else bias, out, columns, inner, chosen.turns, **common
        )
        return out
    block_m, parts = max(16, triton.next_power_of_2(rows)), out
    if chosen.split > 1:
        parts = torch.empty(tiles * chosen.split * block_m * chosen.block_n, dtype=torch.float32, device=x.device)
    common["num_stages"] = fitting_stages(x.device, common["num_stages"], (block_m + chosen.block_n) * chosen.block_k * x.element_size())
    _tiles[(tiles, chosen.split)](
        x, weight, weight if bias is None else bias, out, parts, arrived, rows, columns, inner, chosen.split, x.stride(0), out.stride(0),
        BLOCK_M=block_m, SPLIT=chosen.split > 1, **common,
    )  # fmt: skip
    return out
