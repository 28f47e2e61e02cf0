"""Products with float8 weights in Triton. With few rows reading the weights is all the work; a measured table says which way.

One row: as in `gemm.py`, each code made a number on its way into the sum. Some rows: the weights are the matrix units' left side, so
that their rows fill it; either they are made numbers of x's dtype, or x has been made float8 too. Many rows: both are float8, and torch's
product multiplies them where each output has its own scale; where squares of weights have one, ours does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.triton.fp8_rows import Fp8Rows, coded
from pagoda.ops.triton.gemm_routes import ONE_SCALE, Fp8Route, fp8_route
from pagoda.ops.triton.launch import BESIDE, early, fitting_stages
from pagoda.ops.triton.order import let_next_start, wait_for_last


@triton.jit
def _vector(x, weight, scale, bias, out, columns, inner, scale_n, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SQUARE: tl.constexpr,
            EVEN_K: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rows = weight + n.to(tl.int64)[:, None] * inner
    there = (n < columns)[:, None]
    # Weights are nobody's result: the first of them are under way before the kernel in front has ended.
    tile = tl.load(rows + k[None, :], mask=there & (k < inner)[None, :], other=0.0)
    let_next_start(EARLY)
    wait_for_last(EARLY)
    for start in range(0, inner, BLOCK_K):
        if EVEN_K:
            values = tl.load(x + start + k).to(tl.float32)
        else:
            values = tl.load(x + start + k, mask=start + k < inner, other=0.0).to(tl.float32)
        if SQUARE > 0:
            # All of a program's columns lie in one row of squares.
            square = scale + tl.program_id(0) * BLOCK_N // SQUARE * scale_n + (start + k) // SQUARE
            values *= tl.load(square, mask=start + k < inner, other=0.0)
        later = start + BLOCK_K + k
        following = tl.load(rows + later[None, :], mask=there & (later < inner)[None, :], other=0.0)
        acc += tile.to(tl.float32) * values[None, :]
        tile = following
    result = tl.sum(acc, 1)
    if SQUARE == 0:
        result *= tl.load(scale + n, mask=n < columns, other=0.0)
    if BIAS:
        result += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=n < columns)


@triton.jit
def _rescale(out, x_scale, scale, bias, columns, xs_t, BLOCK: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):
    """Rows and columns of a product of codes by their scales, in place."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < columns
    value = tl.load(out + row * columns + n, mask=mask, other=0.0).to(tl.float32)
    value *= tl.load(scale + n, mask=mask, other=0.0) * tl.load(x_scale + row * xs_t)
    if BIAS:
        value += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * columns + n, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _tiles(x, x_scale, weight, scale, bias, out, parts, arrived, rows, columns, inner, splits, x_t, xs_t, out_t, scale_n,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SQUARE: tl.constexpr,
           EVEN_K: tl.constexpr, BOTH: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """BLOCK_N columns of a block of rows, the inner dimension split over programs, whose last one adds up. BOTH: x is float8 too."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n, k = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    share = tl.cdiv(tl.cdiv(inner, BLOCK_K), splits) * BLOCK_K
    low = split * share
    high = tl.minimum(low + share, inner)
    let_next_start(EARLY)
    wait_for_last(EARLY)
    a = weight + n.to(tl.int64)[:, None] * inner + k[None, :]
    b = x + m.to(tl.int64)[None, :] * x_t + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(low, high, BLOCK_K):
        mask_a, mask_b = (n < columns)[:, None], (m < rows)[None, :]
        if not EVEN_K:
            mask_a = mask_a & (start + k < inner)[None, :]
            mask_b = mask_b & (start + k < inner)[:, None]
        left = tl.load(a + start, mask=mask_a, other=0.0)
        right = tl.load(b + start, mask=mask_b, other=0.0)
        if not BOTH:
            left = left.to(right.dtype)
        if SQUARE > 0:
            product = tl.dot(left, right, input_precision="ieee")
            factor = tl.load(scale + tile * BLOCK_N // SQUARE * scale_n + start // SQUARE)
            if BOTH:
                of_rows = tl.load(x_scale + m * xs_t + start // SQUARE, mask=m < rows, other=0.0) * factor
                acc += product * of_rows[None, :]
            else:
                acc += product * factor
        else:
            acc = tl.dot(left, right, acc, input_precision="ieee")
    inside = (n < columns)[:, None] & (m < rows)[None, :]
    last = True
    if SPLIT:
        part = parts + tile * (splits * BLOCK_M * BLOCK_N) + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(part + split * (BLOCK_M * BLOCK_N), acc)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(arrived + tile, 0)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(splits):
                acc += tl.load(part + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if last:
        if SQUARE == 0:
            acc *= tl.load(scale + n, mask=n < columns, other=0.0)[:, None]
            if BOTH:
                acc *= tl.load(x_scale + m * xs_t, mask=m < rows, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[:, None]
        tl.store(out + m.to(tl.int64)[None, :] * out_t + n[:, None], acc.to(out.dtype.element_ty), mask=inside)


class GemmFp8(PlainKernel):
    """`run(packed, x)`, as in `ops.linear_fp8.GemmFp8Reference`; many rows of x are made float8, each with a scale of its own."""

    facts: GemmFp8Facts

    def __init__(self, facts: GemmFp8Facts) -> None:
        super().__init__(facts)
        self._routes: dict[int, Fp8Route | None] = {}
        self._arrived: torch.Tensor | None = None

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(0, self.facts.out_features) if x.shape[0] == 0 else self._chosen(packed, x, self.way(x.shape[0]))

    def way(self, rows: int) -> Fp8Route | None:
        """None: float8 rows through torch's product."""
        if rows not in self._routes:
            self._routes[rows] = fp8_route(rows, self.facts.out_features, self.facts.in_features, self.facts.block)
        return self._routes[rows]

    def takes_codes(self, rows: int) -> bool:
        """Whether so many rows of x become float8."""
        way = self.way(rows)
        return way is None or way.both

    def _chosen(self, packed: Any, x: torch.Tensor, way: Fp8Route | None) -> torch.Tensor:
        if way is None or way.both:
            return self.coded_rows(packed, coded(x, self.facts.block), x.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        return multiply(self.facts, packed, x, None, x.dtype, self.counters(x.device), way)

    def coded_rows(self, packed: Any, rows: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
        """The same of rows that are float8 already."""
        way = self.way(rows.codes.shape[0])
        if way == ONE_SCALE:
            return one_scale(packed, rows, dtype)
        if way is not None and way.both:
            return multiply(self.facts, packed, rows.codes, rows.scale, dtype, self.counters(rows.codes.device), way)
        return scaled_mm(packed, rows, dtype)

    def counters(self, device: torch.device) -> torch.Tensor:
        if self._arrived is None:
            # One for all layers of this shape: they run one after the other, and each leaves zeros.
            self._arrived = torch.zeros(triton.cdiv(self.facts.out_features, 16), dtype=torch.int32, device=device)
        return self._arrived


def scaled_mm(packed: Any, rows: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
    """torch's product of float8 numbers, with a scale for each row of either side."""
    scales = packed["scale"].view(1, -1)
    out = torch._scaled_mm(rows.codes, packed["weight"].t(), rows.scale, scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    if "bias" in packed:
        out += packed["bias"]
    return out.to(dtype)


def one_scale(packed: Any, rows: Fp8Rows, dtype: torch.dtype) -> torch.Tensor:
    """The same through torch's product of codes alone, which has more ways for few rows; scales come after."""
    one, scale, bias = _one(rows.codes.device), packed["scale"], packed.get("bias")
    out = torch._scaled_mm(rows.codes, packed["weight"].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    count, columns = out.shape
    _rescale[(count, triton.cdiv(columns, 2048))](
        out, rows.scale, scale, scale if bias is None else bias, columns, rows.scale.stride(0), BLOCK=2048, BIAS=bias is not None,
        **early(out.device),
    )  # fmt: skip
    return out.to(dtype)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def multiply(facts: GemmFp8Facts, packed: Any, x: torch.Tensor, x_scale: torch.Tensor | None, dtype: torch.dtype, arrived: torch.Tensor,
             way: Fp8Route) -> torch.Tensor:  # fmt: skip
    """In the way that `way` says. `x_scale`: of x in float8. `arrived`: a zero for each tile, int32, zeros again afterwards."""
    rows, columns, inner = x.shape[0], facts.out_features, facts.in_features
    weight, scale, bias = packed["weight"], packed["scale"], packed.get("bias")
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    tiles = triton.cdiv(columns, way.block_n)
    common = {
        "BLOCK_N": way.block_n, "BLOCK_K": way.block_k, "SQUARE": facts.block, "EVEN_K": inner % way.block_k == 0, "BIAS": bias is not None,
        "num_warps": way.warps, "num_stages": way.depth(x.element_size()), **early(x.device),
    }  # fmt: skip
    given, scale_n = weight if bias is None else bias, scale.stride(0) if facts.block else 0
    if way.split == 0:
        _vector[(tiles,)](x, weight, scale, given, out, columns, inner, scale_n, **common)
        return out
    block_m = min(max(16, triton.next_power_of_2(rows)), way.block_m)
    stage = (block_m * x.element_size() + way.block_n) * way.block_k
    common["num_stages"] = fitting_stages(x.device, common["num_stages"], stage, BESIDE)
    # The counters are those of one block of rows.
    splits, parts = way.split if rows <= block_m else 1, out
    if splits > 1:
        parts = torch.empty(tiles * splits * block_m * way.block_n, dtype=torch.float32, device=x.device)
    _tiles[(tiles, splits, triton.cdiv(rows, block_m))](
        x, scale if x_scale is None else x_scale, weight, scale, given, out, parts, arrived, rows, columns, inner, splits, x.stride(0),
        0 if x_scale is None else x_scale.stride(0), out.stride(0), scale_n, BLOCK_M=block_m, SPLIT=splits > 1,
        BOTH=x_scale is not None, **common,
    )  # fmt: skip
    return out
