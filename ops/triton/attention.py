"""Paged attention and the KV write in Triton: ragged prefill and split-KV decode from one kernel (arXiv:2309.06180, 2205.14135).

A program takes a block of query tokens of one request with all the query heads of one KV head, so K and V are read once per
group. With few rows the keys are split over programs, and a second kernel merges the partial results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch


@triton.jit
def _write_kv(k, v, k_pages, v_pages, slots, k_t, k_h, v_t, v_h, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h,
              PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    page, offset = slot // PAGE, slot % PAGE
    d = tl.arange(0, BLOCK_D)
    key = tl.load(k + token * k_t + head * k_h + d, mask=d < D)
    tl.store(k_pages + page * kp_p + offset * kp_t + head * kp_h + d, key.to(k_pages.dtype.element_ty), mask=d < D)
    value = tl.load(v + token * v_t + head * v_h + d, mask=d < DV)
    tl.store(v_pages + page * vp_p + offset * vp_t + head * vp_h + d, value.to(v_pages.dtype.element_ty), mask=d < DV)


class WriteKv(PlainKernel):
    """`run(k, v, k_pages, v_pages, slots)`, as in `ops.attention.WriteKvReference`."""

    facts: AttentionFacts

    def run(self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
        facts = self.facts
        if k.shape[0] == 0:
            return
        _write_kv[(k.shape[0], facts.num_kv_heads)](
            k, v, k_pages, v_pages, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *k_pages.stride()[:3], *v_pages.stride()[:3],
            PAGE=facts.page_size, HEADS=facts.num_kv_heads, D=facts.head_dim, DV=facts.v_dim,
            BLOCK_D=triton.next_power_of_2(max(facts.head_dim, facts.v_dim)),
        )  # fmt: skip


@triton.jit
def _find_request(query_start, block, num_requests, BLOCK_Q: tl.constexpr):
    """Largest r with query_start[r] // BLOCK_Q + r ≤ block: request r owns blocks from there on."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attention(q, k_pages, v_pages, out, part, lse, query_start, seq_lens, table, sinks, slopes,
               scale, softcap, num_requests, q_t, q_h, o_t, o_h, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, table_r,
               HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
               TILE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
               BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
               SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, SPLITS: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _find_request(query_start, block, num_requests, BLOCK_Q)
    first = tl.load(query_start + request)
    queries = tl.load(query_start + request + 1) - first
    start = (block - (first // BLOCK_Q + request)) * BLOCK_Q
    if start >= queries:
        return
    seq_len = tl.load(seq_lens + request)
    m = tl.arange(0, BLOCK_M)
    row, head = start + m // GROUP, kv_head * GROUP + m % GROUP
    valid = (row < queries) & (m < BLOCK_Q * GROUP)
    position = seq_len - queries + row
    token = (first + row).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    query = tl.load(q + token[:, None] * q_t + head[:, None] * q_h + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)

    last = tl.minimum(seq_len - queries + start + BLOCK_Q, seq_len) if CAUSAL else seq_len
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(seq_len - queries + start - WINDOW + 1, 0)
    if CHUNK > 0:
        begin = tl.maximum(begin, (seq_len - queries + start) // CHUNK * CHUNK)
    # Keys before `begin` may lie in dropped pages, whose content is anything: they are masked even inside the first tile.
    first_tile = begin // TILE * TILE
    per_split = tl.cdiv(tl.cdiv(last - first_tile, TILE), SPLITS) * TILE
    low = first_tile + split * per_split
    high = tl.minimum(low + per_split, last)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for tile in range(low, high, TILE):
        j = tile + tl.arange(0, TILE)
        inside = (j >= begin) & (j < high)
        page = tl.load(table + request * table_r + j // PAGE, mask=inside, other=0).to(tl.int64)
        offset = (j % PAGE).to(tl.int64)
        key = tl.load(k_pages + (page * kp_p + offset * kp_t + kv_head * kp_h)[None, :] + d[:, None],
                      mask=inside[None, :] & (d < D)[:, None], other=0.0)  # fmt: skip
        logits = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
        if SOFTCAP:
            logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
        if ALIBI:
            logits -= tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)[:, None] * (position[:, None] - j[None, :])
        seen = inside[None, :] & valid[:, None]
        if CAUSAL:
            seen &= j[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= position[:, None] - j[None, :] < WINDOW
        if CHUNK > 0:
            seen &= position[:, None] // CHUNK == j[None, :] // CHUNK
        logits = tl.where(seen, logits * 1.4426950408889634, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logits - safe[:, None])
        shrink = tl.exp2(top - safe)
        value = tl.load(v_pages + (page * vp_p + offset * vp_t + kv_head * vp_h)[:, None] + dv[None, :],
                        mask=inside[:, None] & (dv < DV)[None, :], other=0.0)  # fmt: skip
        acc = acc * shrink[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype), input_precision=PRECISION)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top

    if SPLITS > 1:
        base = (token * HEADS + head) * SPLITS + split
        tl.store(part + base[:, None] * DV + dv[None, :], acc, mask=valid[:, None] & (dv < DV)[None, :])
        tl.store(lse + base * 2, top, mask=valid)
        tl.store(lse + base * 2 + 1, total, mask=valid)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
            safe = tl.maximum(top, sink)
            shrink = tl.exp2(top - safe)
            acc = acc * shrink[:, None]
            total = total * shrink + tl.exp2(sink - safe)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + token[:, None] * o_t + head[:, None] * o_h + dv[None, :], result.to(out.dtype.element_ty),
                 mask=valid[:, None] & (dv < DV)[None, :])  # fmt: skip


@triton.jit
def _merge(part, lse, out, sinks, o_t, o_h, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
           SPLITS: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, dv = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    base = (token * HEADS + head) * SPLITS + s
    tops, totals = tl.load(lse + base * 2), tl.load(lse + base * 2 + 1)
    top = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(tops - top)
    total = tl.sum(totals * weight, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    acc = tl.load(part + base[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + token * o_t + head * o_h + dv, result.to(out.dtype.element_ty), mask=dv < DV)


class AttentionPlan(NamedTuple):
    """How many ways the keys of a step are split, decided from upper bounds only."""

    splits: int


class PagedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self.group = facts.num_heads // facts.num_kv_heads
        self.block_d = max(triton.next_power_of_2(facts.head_dim), 16)
        self.block_dv = max(triton.next_power_of_2(facts.v_dim), 16)
        self.precision = "ieee" if facts.dtype == "float32" else "tf32"

    def plan(self, batch: PagedBatch, buffers: Any | None = None) -> AttentionPlan:
        """Enough programs for a large device: decode rows × KV heads × splits, at least 256 keys each."""
        if batch.max_query > 1:
            return AttentionPlan(1)
        programs = max(batch.seq_lens.shape[0] * self.facts.num_kv_heads, 1)
        wanted = min(-(-512 // programs), -(-batch.max_seq // 256), 64)
        return AttentionPlan(triton.next_power_of_2(max(wanted, 1)))

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: AttentionPlan | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        facts, tokens, splits = self.facts, q.shape[0], plan.splits if plan else 1
        # Padding tokens belong to no request and no program writes them: zero is their finite number.
        out = torch.zeros(tokens, facts.num_heads, facts.v_dim, dtype=q.dtype, device=q.device)
        if tokens == 0:
            return out
        part = lse = out
        if splits > 1:
            part = torch.zeros(tokens, facts.num_heads, splits, facts.v_dim, dtype=torch.float32, device=q.device)
            lse = torch.zeros(tokens, facts.num_heads, splits, 2, dtype=torch.float32, device=q.device)
        self._launch(q, k_pages, v_pages, batch, out, part, lse, sinks, slopes, splits)
        if splits > 1:
            _merge[(tokens, facts.num_heads)](
                part, lse, out, out if sinks is None else sinks, out.stride(0), out.stride(1),
                HEADS=facts.num_heads, DV=facts.v_dim, BLOCK_DV=self.block_dv, SPLITS=splits, SINKS=sinks is not None,
            )  # fmt: skip
        return out

    def _launch(self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, out: torch.Tensor,
                part: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, slopes: torch.Tensor | None,
                splits: int) -> None:  # fmt: skip
        facts, requests = self.facts, batch.seq_lens.shape[0]
        block_m = 16 if batch.max_query == 1 else 64 if self.block_d <= 128 else 32
        block_m = max(block_m, triton.next_power_of_2(self.group))
        block_q = 1 if batch.max_query == 1 else max(block_m // self.group, 1)
        grid = (q.shape[0] // block_q + requests, facts.num_kv_heads, splits)
        _attention[grid](
            q, k_pages, v_pages, out, part, lse, batch.query_start, batch.seq_lens, batch.block_table,
            out if sinks is None else sinks, out if slopes is None else slopes,
            facts.scale, facts.softcap or 0.0, requests,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            batch.block_table.stride(0),
            HEADS=facts.num_heads, GROUP=self.group, BLOCK_Q=block_q, BLOCK_M=block_m,
            TILE=32 if self.block_d > 128 or facts.dtype == "float32" else 64, PAGE=facts.page_size,
            D=facts.head_dim, DV=facts.v_dim, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv,
            WINDOW=facts.window or 0, CHUNK=facts.chunk or 0, CAUSAL=facts.causal, SOFTCAP=facts.softcap is not None,
            SINKS=sinks is not None, ALIBI=slopes is not None, SPLITS=splits, PRECISION=self.precision,
            num_warps=4, num_stages=2,
        )  # fmt: skip
