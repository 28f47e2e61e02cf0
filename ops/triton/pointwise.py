"""Norms, rotary embedding and gated activation in Triton: one program a row, float32 inside."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.norm import GatedNormFacts, NormFacts
from pagoda.ops.rope import RopeFacts
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last


@triton.jit
def rms_normed(value, weight, column, mask, eps, offset, WIDTH: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr):
    """A row, zeros behind it, normed and weighted, in float32."""
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    if WEIGHT:
        scale = tl.load(weight + column, mask=mask, other=0.0)
        if OFFSET:
            normed = normed * (scale.to(tl.float32) + offset)
        else:
            normed = (normed.to(value.dtype) * scale).to(tl.float32)
    return normed


@triton.jit
def _rms_norm(x, residual, weight, out, total, rows_inner, x_outer, x_inner, o_outer, o_inner, eps, offset,
              WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
              OFFSET: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    place = row // rows_inner * x_outer + row % rows_inner * x_inner
    value = tl.load(x + place + column, mask=mask, other=0.0)
    if ADD:
        value = value + tl.load(residual + row * WIDTH + column, mask=mask, other=0.0)
        tl.store(total + row * WIDTH + column, value, mask=mask)
    normed = rms_normed(value, weight, column, mask, eps, offset, WIDTH, WEIGHT, OFFSET)
    target = row // rows_inner * o_outer + row % rows_inner * o_inner
    tl.store(out + target + column, normed.to(out.dtype.element_ty), mask=mask)


class RmsNorm(PlainKernel):
    """`run(packed, x)`, as in `ops.norm.RmsNormReference`; x may be a view of rows or of heads."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous().view(-1, self.facts.width)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            _launch_norm(self.facts, packed, x, None, out, None)
        return out


class AddRmsNorm(PlainKernel):
    """`run(packed, x, residual)`, as in `ops.norm.AddRmsNormReference`."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        if x.numel():
            _launch_norm(self.facts, packed, x, residual, out, total)
        return out, total


def _launch_norm(facts: NormFacts, packed: Any, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor,
                 total: torch.Tensor | None) -> None:  # fmt: skip
    inner = x.shape[-2] if x.dim() == 3 else 1
    outer_x, outer_o = (x.stride(0), out.stride(0)) if x.dim() > 1 else (0, 0)
    inner_x, inner_o = (x.stride(1), out.stride(1)) if x.dim() == 3 else (0, 0)
    block = triton.next_power_of_2(facts.width)
    _rms_norm[(x.numel() // facts.width,)](
        x, x if residual is None else residual, packed["weight"] if facts.weight else x, out, out if total is None else total,
        inner, outer_x, inner_x, outer_o, inner_o, facts.eps, facts.offset,
        WIDTH=facts.width, BLOCK=block, ADD=residual is not None, WEIGHT=facts.weight, OFFSET=facts.offset != 0.0,
        num_warps=min(max(block // 512, 1), 8), **early(x.device, x.shape[0]),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _gated_norm(x, gate, weight, out, rows, x_t, gate_t, eps, GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
                BLOCK: tl.constexpr, SILU: tl.constexpr, FIRST: tl.constexpr, SHARED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """TOGETHER of the tokens' groups, which are `rows` in all."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, BLOCK)
    token, begin = row // GROUPS, row % GROUPS * WIDTH
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + (token * x_t + begin)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    number = tl.load(gate + (token * gate_t + begin)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-number))
    if SILU:
        factor *= number
    if FIRST:
        value *= factor
    if SHARED:
        scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    else:
        scale = tl.load(weight + begin[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None] * scale
    if not FIRST:
        normed *= factor
    tl.store(out + row[:, None] * WIDTH + column[None, :], normed.to(out.dtype.element_ty), mask=mask)


class GatedNorm(PlainKernel):
    """`run(packed, x, gate)`, as in `ops.norm.GatedNormReference`. A program's share is the same in every batch, as its sums are."""

    facts: GatedNormFacts

    def run(self, packed: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        facts = self.facts
        x, gate = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, gate))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, block = x.shape[0] * facts.groups, triton.next_power_of_2(facts.width)
        together = max(1, 512 // block)
        if rows:
            _gated_norm[(triton.cdiv(rows, together),)](
                x, gate, packed["weight"], out, rows, x.stride(0), gate.stride(0), facts.eps, GROUPS=facts.groups, WIDTH=facts.width,
                TOGETHER=together, BLOCK=block, SILU=facts.gate == "silu", FIRST=facts.gate_first, SHARED=facts.weight == "shared",
                num_warps=min(max(block // 512, 2), 8), **early(x.device, x.shape[0]),
            )  # fmt: skip
        return out


@triton.jit
def _turn(base, i, c, s, mask, HALF: tl.constexpr, NEOX: tl.constexpr):
    first = i if NEOX else 2 * i
    second = i + HALF if NEOX else 2 * i + 1
    a = tl.load(base + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(base + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(base + first, (a * c - b * s).to(base.dtype.element_ty), mask=mask)
    tl.store(base + second, (b * c + a * s).to(base.dtype.element_ty), mask=mask)


@triton.jit
def _rope(q, k, cos, sin, q_t, q_h, k_t, k_h, cos_t, sin_t, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
          NEOX: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    c = tl.load(cos + token * cos_t + i, mask=mask, other=0.0)
    s = tl.load(sin + token * sin_t + i, mask=mask, other=0.0)
    # A pointer that comes out of a branch is more than AMD's compiler can follow.
    if head < HEADS:
        _turn(q + token * q_t + head * q_h, i, c, s, mask, HALF, NEOX)
    else:
        _turn(k + token * k_t + (head - HEADS) * k_h, i, c, s, mask, HALF, NEOX)


class Rope(PlainKernel):
    """`run(q, k, cos, sin)`, as in `ops.rope.RopeReference`; rotates in place."""

    facts: RopeFacts

    def run(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.facts.rotary_dim // 2
        if q.shape[0]:
            _rope[(q.shape[0], q.shape[1] + k.shape[1])](
                q, k, cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0), sin.stride(0),
                HEADS=q.shape[1], HALF=half, BLOCK=triton.next_power_of_2(half), NEOX=self.facts.style == "neox", num_warps=1,
            )  # fmt: skip
        return q, k


@triton.jit
def _silu_and_mul(x, out, x_t, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x + row * x_t + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_t + WIDTH + column, mask=mask, other=0.0)
    act = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * WIDTH + column, act * up, mask=mask)


class SiluAndMul(PlainKernel):
    """`run(x)`, as in `ops.activation.GatedActivationReference` for plain SiLU."""

    facts: ActivationFacts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1] // 2
        flat = x.reshape(-1, 2 * width)
        out = torch.empty(flat.shape[0], width, dtype=x.dtype, device=x.device)
        if out.numel():
            block = min(triton.next_power_of_2(width), 1024)
            _silu_and_mul[(flat.shape[0], triton.cdiv(width, block))](
                flat, out, flat.stride(0), WIDTH=width, BLOCK=block, **early(x.device, flat.shape[0])
            )  # fmt: skip
        return out.view(*x.shape[:-1], width)
