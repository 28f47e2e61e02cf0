"""What the recurrences' programs share: a request's tokens and its state's pages, zeros for padding, and how a launch names them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.paged_kernels import LOG2E, find_request

STEP = ["query_start", "fresh", "read", "write"]
"""Arrays of a step, which begin anywhere: a compiled kernel must not depend on it."""
SIZES = ["rows", "tokens", "few", "read_r", "write_r"]
"""Numbers of a step, likewise."""
FEW = 8
"""Tokens of a request up to which they are taken one by one: the state is read and written once either way."""
ALL = 2**30
"""As many where every request is."""
PROGRAMS = 528
"""Programs of a launch below which they take less of a state each."""

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def segment(query_start, row):
    """The first token of a request, and the one after its last."""
    return tl.load(query_start + row), tl.load(query_start + row + 1)


@triton.jit
def state_of(fresh, read, write, row, read_r, write_r):
    """Whether there is a state before the step, and the pages of the state before and after it."""
    kept = tl.load(fresh + row).to(tl.int32) == 0
    return kept, tl.load(read + row.to(tl.int64) * read_r).to(tl.int64), tl.load(write + row.to(tl.int64) * write_r).to(tl.int64)


@triton.jit
def piece_of(query_start, block, many, few, SIZE: tl.constexpr):
    """The first token of the `block`-th piece of SIZE tokens, and the one after its request's last; request r owns pieces as in
    `find_request`. Where there is no such piece, or the request has no more than `few` tokens, the first is not below the other."""
    row = find_request(query_start, block, many, SIZE)
    first, end = segment(query_start, row)
    start = first + (block - (first // SIZE + row)) * SIZE
    return tl.where(end - first <= few, end, start), end


@triton.jit
def rows_of(x, first, end, x_t, column, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Numbers of ROWS tokens from `first`, 0 from `end` on and past WIDTH. Places within are 32 bits: a thread holds many."""
    each = tl.arange(0, ROWS)
    mask = (first + each < end)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + tl.cast(first, tl.int64) * x_t + (each[:, None] * x_t + column[None, :]), mask=mask, other=0.0)


@triton.jit
def tile_of(x, place, row, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Where numbers of the tile at `place` lie, of tiles that follow each other."""
    return x + place * (ROWS * WIDTH) + (row[:, None] * WIDTH + column[None, :])


@triton.jit
def softplus(x):
    """ln(1 + eˣ), to the last bits where that is small: there 1 + e would lose e, whose series it is."""
    e = tl.exp2(tl.abs(x) * -LOG2E)
    series = e * (1.0 - e * (1.0 / 2 - e * (1.0 / 3 - e * (1.0 / 4 - e * (1.0 / 5 - e * (1.0 / 6))))))
    return tl.maximum(x, 0.0) + tl.where(e < 1.0 / 16, series, tl.log2(1.0 + e) * LN2)


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ), by one instruction each for power and quotient instead of four and six."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def step_of(place, mask, shift, LOW: tl.constexpr, HIGH: tl.constexpr, STEPS: tl.constexpr):
    """A state space's step, from LOW to HIGH; 0 where there is no token, and 1 elsewhere without STEPS."""
    if STEPS:
        step = softplus(tl.load(place, mask=mask, other=0.0).to(tl.float32) + shift)
        step = tl.minimum(tl.maximum(step, LOW), HIGH)
    else:
        step = mask.to(tl.float32) + 0.0 * shift
    return tl.where(mask, step, 0.0)


@triton.jit
def zero_rest(out, o_t, column, mask, first, tokens):
    """Tokens from `first` on belong to no request: their numbers at `column` become 0."""
    for token in range(first, tokens):
        tl.store(out + tl.cast(token, tl.int64) * o_t + column, tl.zeros(column.shape, out.dtype.element_ty), mask=mask)


def step_args(batch: StateBatch) -> tuple[Any, ...]:
    """`query_start, fresh, read, write`."""
    return batch.query_start, batch.fresh, batch.read, batch.write


def page_steps(batch: StateBatch) -> tuple[int, int]:
    """`read_r, write_r`."""
    return batch.read.stride(0), batch.write.stride(0)


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """The same, its last dimension without gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_of(count: int, width: int, heads_rows: int) -> int:
    """How many of a head's `count` vectors of `width` numbers, its state, a program holds in registers: at most 4,096 numbers, fewer where
    there are few programs. `heads_rows`: heads times requests."""
    block = max(1, min(triton.next_power_of_2(count), 4096 // triton.next_power_of_2(width)))
    few = heads_rows * triton.cdiv(count, block) < PROGRAMS
    return max(1, block // 2) if few and block >= 32 else block
