"""Products whose sums are taken in one order whatever the number of rows: for `--batch-invariant`, plain and float8 weights.

The inner dimension is cut into stretches that depend on the shape of the weights alone. Each is summed by itself, and the sums are added
up in order: by the last program to arrive where programs share a tile's stretches, in turn where a program takes all of them. Both give
the same bits, so few rows can keep a device busy and many rows need not write parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.order import let_next_start, wait_for_last

PROGRAMS = 256
"""Programs that keep a large device busy."""
STRETCH = 512
"""Fewest inner numbers of a stretch."""
FEW = 64
"""Rows of a tile, and up to which stretches are spread over programs."""


@triton.jit(do_not_specialize=["rows"])
def _stretches(x, weight, scale, bias, out, parts, arrived, rows, columns, inner, share, splits, x_t, out_t, scale_n,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPREAD: tl.constexpr, EVEN_K: tl.constexpr,
               SCALED: tl.constexpr, SQUARE: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    block, tile = tl.program_id(0), tl.program_id(1)
    m, n, k = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a = x + m.to(tl.int64)[:, None] * x_t + k[None, :]
    b = weight + n.to(tl.int64)[None, :] * inner + k[:, None]
    first, stop = 0, splits
    if SPREAD:
        first = tl.program_id(2)
        stop = first + 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in range(first, stop):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(split * share, tl.minimum(split * share + share, inner), BLOCK_K):
            mask_a, mask_b = (m < rows)[:, None], (n < columns)[None, :]
            if not EVEN_K:
                mask_a = mask_a & (start + k < inner)[None, :]
                mask_b = mask_b & (start + k < inner)[:, None]
            left = tl.load(a + start, mask=mask_a, other=0.0)
            right = tl.load(b + start, mask=mask_b, other=0.0).to(left.dtype)
            if SQUARE > 0:
                factor = tl.load(scale + tile * BLOCK_N // SQUARE * scale_n + start // SQUARE)
                acc += tl.dot(left, right, input_precision="ieee") * factor
            else:
                acc = tl.dot(left, right, acc, input_precision="ieee")
        total += acc
    last = True
    if SPREAD:
        part = parts + tile * (splits * BLOCK_M * BLOCK_N) + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(part + first * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(arrived + tile, 0)
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in range(splits):
                total += tl.load(part + other * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if last:
        if SCALED and SQUARE == 0:
            total *= tl.load(scale + n, mask=n < columns, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
        inside = (m < rows)[:, None] & (n < columns)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * out_t + n[None, :], total.to(out.dtype.element_ty), mask=inside)


class GemmFixed(PlainKernel):
    """`run(packed, x)`, as in `ops.linear.GemmReference` and `ops.linear_fp8.GemmFp8Reference`."""

    facts: GemmFacts | GemmFp8Facts

    def __init__(self, facts: GemmFacts | GemmFp8Facts) -> None:
        super().__init__(facts)
        self._square = facts.block if isinstance(facts, GemmFp8Facts) else 0
        narrow = facts.dtype != "float32"
        self._columns = 128 if narrow and facts.out_features >= 8192 else 64
        self._inner = 64 if narrow else 32
        tiles = triton.cdiv(facts.out_features, self._columns)
        self._splits, self._share = stretches(tiles, facts.in_features)
        self._arrived: torch.Tensor | None = None

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        rows, columns, inner = x.shape[0], self.facts.out_features, self.facts.in_features
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        if rows == 0:
            return out
        x = x if x.stride(-1) == 1 else x.contiguous()
        weight, scale, bias = packed["weight"].contiguous(), packed.get("scale"), packed.get("bias")
        few = rows <= FEW
        spread = few and self._splits > 1
        block_m = 64 if few or x.element_size() > 2 else 128
        tiles = triton.cdiv(columns, self._columns)
        stage = (block_m + self._columns) * self._inner * x.element_size()
        parts = out
        if spread:
            parts = torch.empty(tiles * self._splits * block_m * self._columns, dtype=torch.float32, device=x.device)
        _stretches[(triton.cdiv(rows, block_m), tiles, self._splits if spread else 1)](
            x, weight, weight if scale is None else scale, weight if bias is None else bias, out, parts, self._counters(tiles, x.device),
            rows, columns, inner, self._share, self._splits, x.stride(0), out.stride(0), scale.stride(0) if self._square else 0,
            BLOCK_M=block_m, BLOCK_N=self._columns, BLOCK_K=self._inner, SPREAD=spread, EVEN_K=inner % self._inner == 0,
            SCALED=scale is not None, SQUARE=self._square, BIAS=bias is not None, num_warps=4 if block_m == 64 else 8,
            num_stages=fitting_stages(x.device, 4, stage), enable_fp_fusion=False, **early(x.device),
        )  # fmt: skip
        return out

    def _counters(self, tiles: int, device: torch.device) -> torch.Tensor:
        if self._arrived is None:
            # One for all layers of this shape: they run one after the other, and each leaves zeros.
            self._arrived = torch.zeros(tiles, dtype=torch.int32, device=device)
        return self._arrived


def stretches(tiles: int, inner: int) -> tuple[int, int]:
    """How many stretches `inner` numbers are cut into where there are so many tiles of columns, and how long each is."""
    wanted = max(1, min(round(PROGRAMS / tiles), inner // STRETCH, 16))
    share = triton.cdiv(triton.cdiv(inner, wanted), 128) * 128
    return triton.cdiv(inner, share), share
