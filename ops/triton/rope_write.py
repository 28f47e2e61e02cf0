"""From the projection to the cache in one kernel: norms of heads, rotation, K and V into pages. A program takes heads of a token."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.rope_write import RopeWriteFacts
from pagoda.ops.triton.float8 import as_stored, stored
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last


def cut(tokens: int, heads: int) -> tuple[int, int]:
    """Heads and warps of a program. Few tokens want many small programs, many tokens enough bytes under way and no idle places."""
    if tokens < 16:
        return 1, 1
    if tokens < 512:
        return 4, 1
    return (16, 4) if heads % 16 == 0 else (8, 1)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_write(qkv, q_norm, k_norm, cos, sin, q, k_pages, v_pages, slots, eps, offset, k_scale, v_scale, qkv_t, cos_t, sin_t, kp_p, kp_t,
                kp_h, vp_p, vp_t, vp_h, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
                REST: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr, NEOX: tl.constexpr, NORM: tl.constexpr,
                FLOAT8: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)  # of the step, and there before
    wait_for_last(EARLY)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK)
    there, pair = head < HEADS + 2 * KV, i < HALF
    is_q, is_v = head < HEADS, head >= HEADS + KV
    first = i if NEOX else 2 * i
    second = i + HALF if NEOX else 2 * i + 1
    source = qkv + token * qkv_t + head[:, None] * D
    mask = there[:, None] & pair[None, :]
    a = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
    # What lies behind the rotated part, where heads have such a part.
    if REST > 0:
        j = tl.arange(0, REST)
        behind = there[:, None] & (2 * HALF + j < D)[None, :]
        c = tl.load(source + 2 * HALF + j[None, :], mask=behind, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            squares += tl.sum(c * c, 1)
        # v keeps its numbers: its factor is one.
        scale = tl.where(is_v, 1.0, tl.rsqrt(squares / D + eps))
        a = a * scale[:, None] * _weight(q_norm, k_norm, first, pair, is_q, is_v, offset)
        b = b * scale[:, None] * _weight(q_norm, k_norm, second, pair, is_q, is_v, offset)
        if REST > 0:
            c = c * scale[:, None] * _weight(q_norm, k_norm, 2 * HALF + j, 2 * HALF + j < D, is_q, is_v, offset)
    turn = tl.load(cos + token * cos_t + i, mask=pair, other=0.0)[None, :]
    slide = tl.load(sin + token * sin_t + i, mask=pair, other=0.0)[None, :]
    turned_a = tl.where(is_v[:, None], a, a * turn - b * slide)
    turned_b = tl.where(is_v[:, None], b, b * turn + a * slide)
    factor = tl.where(is_q, k_scale, 1.0 / tl.where(is_v, v_scale, k_scale))[:, None]
    turned_a, turned_b = turned_a * factor, turned_b * factor

    page, place = slot // PAGE, slot % PAGE
    to_q = q + token * HEADS * D + head[:, None] * D
    to_k = k_pages + page * kp_p + place * kp_t + (head - HEADS)[:, None] * kp_h
    to_v = v_pages + page * vp_p + place * vp_t + (head - HEADS - KV)[:, None] * vp_h
    _put(to_q, to_k, to_v, first, pair, turned_a, is_q, is_v, there, FLOAT8)
    _put(to_q, to_k, to_v, second, pair, turned_b, is_q, is_v, there, FLOAT8)
    if REST > 0:
        _put(to_q, to_k, to_v, 2 * HALF + j, 2 * HALF + j < D, c * factor, is_q, is_v, there, FLOAT8)


@triton.jit
def _weight(q_norm, k_norm, place, inside, is_q, is_v, offset):
    """Weights of the heads' norms at `place`, one for v."""
    of_q = tl.load(q_norm + place, mask=inside, other=0.0).to(tl.float32) + offset
    of_k = tl.load(k_norm + place, mask=inside, other=0.0).to(tl.float32) + offset
    return tl.where(is_v[:, None], 1.0, tl.where(is_q[:, None], of_q[None, :], of_k[None, :]))


@triton.jit
def _put(to_q, to_k, to_v, place, inside, value, is_q, is_v, there, FLOAT8: tl.constexpr):
    """Store columns `place` of each head where it belongs."""
    keys = there & ((is_q | is_v) == 0)
    tl.store(to_q + place[None, :], value.to(to_q.dtype.element_ty), mask=is_q[:, None] & inside[None, :])
    tl.store(to_k + place[None, :], stored(value, to_k, FLOAT8), mask=keys[:, None] & inside[None, :])
    tl.store(to_v + place[None, :], stored(value, to_v, FLOAT8), mask=(there & is_v)[:, None] & inside[None, :])


class RopeWrite(PlainKernel):
    """As `ops.rope_write.RopeWriteReference`."""

    facts: RopeWriteFacts

    def run(
        self, packed: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        facts, tokens = self.facts, qkv.shape[0]
        q = torch.empty(tokens, facts.num_heads, facts.head_dim, dtype=qkv.dtype, device=qkv.device)
        if tokens:
            self._launch(packed, qkv, cos, sin, q, k_pages, v_pages, slots)
        return q

    def _cut(self, tokens: int) -> tuple[int, int]:
        return cut(tokens, self.facts.num_heads + 2 * self.facts.num_kv_heads)

    def _launch(self, packed: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k_pages: torch.Tensor,
                v_pages: torch.Tensor, slots: torch.Tensor) -> None:  # fmt: skip
        facts = self.facts
        heads, half = facts.num_heads + 2 * facts.num_kv_heads, facts.rotary_dim // 2
        rest = facts.head_dim - facts.rotary_dim
        block_h, warps = self._cut(qkv.shape[0])
        norms = (packed["q_norm"], packed["k_norm"]) if facts.norm else (qkv, qkv)
        _rope_write[(qkv.shape[0], triton.cdiv(heads, block_h))](
            qkv, *norms, cos, sin, q, as_stored(k_pages), as_stored(v_pages), slots, facts.eps, facts.offset, facts.k_scale, facts.v_scale,
            qkv.stride(0), cos.stride(0), sin.stride(0), *k_pages.stride()[:3], *v_pages.stride()[:3], HEADS=facts.num_heads,
            KV=facts.num_kv_heads,
            D=facts.head_dim, HALF=half, BLOCK=triton.next_power_of_2(half), REST=triton.next_power_of_2(rest) if rest else 0,
            BLOCK_H=block_h, PAGE=facts.page_size, NEOX=facts.style == "neox", NORM=facts.norm, FLOAT8=facts.kv_dtype == "float8_e4m3fn",
            num_warps=warps, **early(qkv.device, qkv.shape[0]),
        )  # fmt: skip


class RopeWriteFixed(RopeWrite):
    """The same with one cut for any number of tokens: squares are summed in one order."""

    def _cut(self, tokens: int) -> tuple[int, int]:
        return 4, 1
