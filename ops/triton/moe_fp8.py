"""Experts with float8 weights in Triton: as in `moe.py`, on the matrix units' float8 rate, rows of x and of the hidden numbers made float8.

Weights are the products' left side, so that few tokens of an expert waste little of the units; each expert that was chosen is read once a
block of its tokens. Squares of weights have their scale multiplied in behind each step of 128 inner numbers, as rows have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts
from pagoda.ops.triton.fp8_rows import Fp8Rows, coded
from pagoda.ops.triton.launch import BESIDE, fitting_stages
from pagoda.ops.triton.moe import sum_choices
from pagoda.ops.triton.moe_activation import activated, kind_of
from pagoda.ops.triton.moe_sort import sort_choices


@triton.jit
def _step(acc, left, right, factor, of_rows, at, BLOCK_K: tl.constexpr, SQUARE: tl.constexpr):
    """Adds one product of codes. `factor`, `of_rows`: where the scales of this row of squares, and of the rows' groups, begin."""
    if SQUARE > 0:
        product = tl.dot(left, tl.trans(right), input_precision="ieee")
        acc += product * (of_rows * tl.load(factor + at // SQUARE))[None, :]
    else:
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["pairs"])
def _up(x, x_scale, weight, scale, bias, shares, order, owner, hidden, pairs, alpha, limit, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
        TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
        SCALE: tl.constexpr, SQUARE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """`act(gate · x, up · x)` of some hidden numbers and one block of choices."""
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    token = (pair // TOP_K).to(tl.int64)
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    groups: tl.constexpr = (WIDTH + SQUARE - 1) // SQUARE if SQUARE > 0 else 1
    squares: tl.constexpr = (HIDDEN + SQUARE - 1) // SQUARE if SQUARE > 0 else 1
    a = weight + expert * (2 * HIDDEN * WIDTH) + n[:, None] * WIDTH + k[None, :]
    b = x + token[:, None] * WIDTH + k[None, :]
    factor = scale + (expert * (2 * squares) + tile * BLOCK_N // SQUARE) * groups if SQUARE > 0 else scale
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    of_rows = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        right = tl.load(b + start, mask=valid[:, None] & (start + k < WIDTH)[None, :], other=0.0)
        mask = (n < HIDDEN)[:, None] & (start + k < WIDTH)[None, :]
        if SQUARE > 0:
            of_rows = tl.load(x_scale + token * groups + start // SQUARE, mask=valid, other=0.0)
        gate = _step(gate, tl.load(a + start, mask=mask, other=0.0), right, factor, of_rows, start, BLOCK_K, SQUARE)
        above = tl.load(a + HIDDEN * WIDTH + start, mask=mask, other=0.0)
        up = _step(up, above, right, factor + squares * groups, of_rows, start, BLOCK_K, SQUARE)
    if SQUARE == 0:
        rows = tl.load(x_scale + token, mask=valid, other=0.0)[None, :]
        outputs = scale + expert * (2 * HIDDEN) + n
        gate *= tl.load(outputs, mask=n < HIDDEN, other=0.0)[:, None] * rows
        up *= tl.load(outputs + HIDDEN, mask=n < HIDDEN, other=0.0)[:, None] * rows
    if SCALE:
        share = tl.load(shares + pair, mask=valid, other=0.0).to(tl.float32)[None, :]
        gate, up = gate * share, up * share
    if BIAS:
        biases = bias + expert * (2 * HIDDEN) + n
        gate += tl.load(biases, mask=n < HIDDEN, other=0.0).to(tl.float32)[:, None]
        up += tl.load(biases + HIDDEN, mask=n < HIDDEN, other=0.0).to(tl.float32)[:, None]
    result = activated(gate, up, alpha, limit, KIND).to(hidden.dtype.element_ty)
    tl.store(hidden + pair.to(tl.int64)[None, :] * HIDDEN + n[:, None], result, mask=valid[None, :] & (n < HIDDEN)[:, None])


@triton.jit(do_not_specialize=["pairs"])
def _down(hidden, h_scale, weight, scale, bias, shares, order, owner, out, pairs, WIDTH: tl.constexpr, HIDDEN: tl.constexpr,
          ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr,
          STAGES: tl.constexpr):  # fmt: skip
    """Each choice's result, with its weight."""
    block, tile = tl.program_id(1), tl.program_id(0)
    expert = tl.load(owner + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order + block * ROWS + tl.arange(0, ROWS))
    valid = pair < pairs
    row = pair.to(tl.int64)
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    groups: tl.constexpr = (HIDDEN + SQUARE - 1) // SQUARE if SQUARE > 0 else 1
    squares: tl.constexpr = (WIDTH + SQUARE - 1) // SQUARE if SQUARE > 0 else 1
    a = weight + expert * (WIDTH * HIDDEN) + n[:, None] * HIDDEN + k[None, :]
    b = hidden + row[:, None] * HIDDEN + k[None, :]
    factor = scale + (expert * squares + tile * BLOCK_N // SQUARE) * groups if SQUARE > 0 else scale
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    of_rows = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K, num_stages=STAGES):
        right = tl.load(b + start, mask=valid[:, None] & (start + k < HIDDEN)[None, :], other=0.0)
        left = tl.load(a + start, mask=(n < WIDTH)[:, None] & (start + k < HIDDEN)[None, :], other=0.0)
        if SQUARE > 0:
            of_rows = tl.load(h_scale + row * groups + start // SQUARE, mask=valid, other=0.0)
        acc = _step(acc, left, right, factor, of_rows, start, BLOCK_K, SQUARE)
    if SQUARE == 0:
        acc *= tl.load(scale + expert * WIDTH + n, mask=n < WIDTH, other=0.0)[:, None]
        acc *= tl.load(h_scale + row, mask=valid, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + expert * WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)[:, None]
    if SCALE:
        acc *= tl.load(shares + pair, mask=valid, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[None, :] * WIDTH + n[:, None], acc, mask=valid[None, :] & (n < WIDTH)[:, None])


class Fp8Tile(NamedTuple):
    """Rows of a block of choices; outputs of a program, inner numbers of a step, warps and stages of up, then of down."""

    rows: int
    up: tuple[int, int, int, int]
    down: tuple[int, int, int, int]


def fp8_tile(choices_an_expert: float, square: int) -> Fp8Tile:
    """Small blocks where experts have few tokens: reading weights is all the work there. Products that are scaled step by step need
    registers for a second result. (`benchmarks/gpu_share.py --only experts --tiles` measures the choices.)"""
    if choices_an_expert <= 8:
        return Fp8Tile(16, (64, 128, 4, 4), (64, 128, 4, 4))
    if choices_an_expert <= 32:
        return Fp8Tile(32, (64, 128, 4, 4), (64, 128, 4, 4))
    if choices_an_expert <= 96 or square:
        return Fp8Tile(64, (64, 128, 4, 4), (64, 128, 4, 4))
    return Fp8Tile(128, (64, 128, 4, 3), (128, 128, 4, 3))


class MoeMlpFp8(PlainKernel):
    """`run(packed, x, weights, ids)`, as in `ops.moe_fp8.MoeMlpFp8Reference` for gated experts."""

    facts: MoeMlpFp8Facts

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return torch.empty_like(x)
        tile = fp8_tile(ids.numel() / self.facts.plain.experts, self.facts.block)
        return self.in_tiles(packed, x, weights.contiguous(), ids.contiguous(), tile)

    def in_tiles(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, tile: Fp8Tile) -> torch.Tensor:
        """The same cut as `tile` says."""
        facts, pairs, square = self.facts.plain, ids.numel(), self.facts.block
        order, owner = sort_choices(facts, ids, tile.rows)
        hidden = torch.empty(pairs, facts.hidden, dtype=x.dtype, device=x.device)
        parts = torch.empty(pairs, facts.width, dtype=x.dtype, device=x.device)
        bias = (packed["up_bias"], packed["down_bias"]) if facts.bias else (x, x)
        common = {"WIDTH": facts.width, "HIDDEN": facts.hidden, "ROWS": tile.rows, "BIAS": facts.bias, "SQUARE": square}
        rows = coded(x, square)
        _up[(triton.cdiv(facts.hidden, tile.up[0]), len(owner))](
            *rows, packed["up"], packed["up_scale"], bias[0], weights, order, owner, hidden, pairs, facts.alpha or 0.0, facts.limit or 0.0,
            TOP_K=facts.top_k, KIND=kind_of(facts), SCALE=facts.scale_input, **common, **_cut(tile.rows, tile.up, 2, x.device),
        )  # fmt: skip
        taken: Fp8Rows = coded(hidden, square)
        _down[(triton.cdiv(facts.width, tile.down[0]), len(owner))](
            *taken, packed["down"], packed["down_scale"], bias[1], weights, order, owner, parts, pairs, SCALE=not facts.scale_input,
            **common, **_cut(tile.rows, tile.down, 1, x.device),
        )  # fmt: skip
        return sum_choices(facts, parts, ids, x.dtype)


def _cut(rows: int, tile: tuple[int, int, int, int], weights: int, device: torch.device) -> dict[str, int]:
    """How a launch is cut, `weights` tiles of which meet the rows in a step; with as many of its stages as shared memory holds."""
    outputs, inner, warps, most = tile
    stages = fitting_stages(device, most, (rows + weights * outputs) * inner, BESIDE)
    return {"BLOCK_N": outputs, "BLOCK_K": inner, "num_warps": warps, "num_stages": stages, "STAGES": stages}
