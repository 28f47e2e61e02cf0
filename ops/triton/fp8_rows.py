"""Rows made float8 in Triton, each with a scale of its own, or one for each so many numbers: plain, normed, or activated on the way."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.linear_fp8 import E4M3
from pagoda.ops.norm import NormFacts
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last


class Fp8Rows(NamedTuple):
    """Codes `[T, K]` and float32 scales: `[T, 1]`, or `[T, K / group]`."""

    codes: torch.Tensor
    scale: torch.Tensor


@triton.jit
def _code(value, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(codes, scales) of a row of BLOCK float32 numbers."""
    if GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / 448.0
        scaled = value / scale
    else:
        groups = tl.reshape(value, [BLOCK // GROUP, GROUP])
        scale = tl.maximum(tl.max(tl.abs(groups), 1), 1e-12) / 448.0
        scaled = tl.reshape(groups / scale[:, None], [BLOCK])
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0), scale


@triton.jit
def _put(codes, scales, row, column, mask, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    scaled, scale = _code(value, BLOCK, GROUP)
    tl.store(codes + row * WIDTH + column, scaled.to(codes.dtype.element_ty), mask=mask)
    if GROUP == 0:
        tl.store(scales + row, scale)
    else:
        count: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * count + group, scale, mask=group < count)


@triton.jit
def _plain(x, codes, scales, x_t, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * x_t + column, mask=mask, other=0.0).to(tl.float32)
    _put(codes, scales, row, column, mask, value, WIDTH, BLOCK, GROUP)


@triton.jit
def _normed(x, residual, weight, codes, scales, total, x_t, eps, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * x_t + column, mask=mask, other=0.0) + tl.load(residual + row * WIDTH + column, mask=mask, other=0.0)
    tl.store(total + row * WIDTH + column, value, mask=mask)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    wide = wide * (tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset)
    _put(codes, scales, row, column, mask, wide, WIDTH, BLOCK, GROUP)


@triton.jit
def _activated(x, codes, scales, x_t, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x + row * x_t + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_t + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    _put(codes, scales, row, column, mask, gate / (1.0 + tl.exp(-gate)) * up, WIDTH, BLOCK, GROUP)


def coded(x: torch.Tensor, group: int = 0) -> Fp8Rows:
    """Rows of x `[T, K]`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = _empty(x.shape[0], x.shape[1], group, x.device)
    _plain[(x.shape[0],)](x, *rows, x.stride(0), **_sizes(x.shape[1], group, x))
    return rows


def coded_norm(
    facts: NormFacts, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, group: int = 0
) -> tuple[Fp8Rows, torch.Tensor]:
    """(norm(x + residual), x + residual) of rows `[T, K]`."""
    x, residual = x if x.stride(-1) == 1 else x.contiguous(), residual.contiguous()
    rows, total = _empty(x.shape[0], facts.width, group, x.device), torch.empty_like(residual)
    sizes = _sizes(facts.width, group, x)
    _normed[(x.shape[0],)](x, residual, weight, *rows, total, x.stride(0), facts.eps, facts.offset, **sizes)
    return rows, total


def coded_silu(x: torch.Tensor, group: int = 0) -> Fp8Rows:
    """Rows of silu(gate) · up, x `[T, 2 K]` has gate and up side by side."""
    width = x.shape[1] // 2
    rows = _empty(x.shape[0], width, group, x.device)
    _activated[(x.shape[0],)](x, *rows, x.stride(0), **_sizes(width, group, x))
    return rows


def _empty(count: int, width: int, group: int, device: torch.device) -> Fp8Rows:
    scales = -(-width // group) if group else 1
    return Fp8Rows(
        torch.empty(count, width, dtype=E4M3, device=device), torch.empty(count, scales, dtype=torch.float32, device=device)
    )  # fmt: skip


def _sizes(width: int, group: int, x: torch.Tensor) -> dict[str, object]:
    block = max(triton.next_power_of_2(width), group)
    return {"WIDTH": width, "BLOCK": block, "GROUP": group, "num_warps": min(max(block // 512, 1), 16), **early(x.device, x.shape[0])}
