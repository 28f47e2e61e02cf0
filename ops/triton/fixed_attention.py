"""Paged attention whose sums are taken in one order for a query, whatever else a step holds: for `--batch-invariant`.

Keys are cut into stretches by their position. A query's softmax over each stretch is taken by itself, and the stretches are joined in
order: by another program where decodes spread theirs, in turn elsewhere. Prompts, their chunks and decodes share one tile, one loop and
one join, so a token gets the same bits in whichever of them it comes; what a query does not see leaves its sums as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.float8 import as_stored
from pagoda.ops.triton.launch import early, waves_of_32
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_kernels import STEP, block_of, divided, keep, rows_of, walk
from pagoda.ops.triton.tiles import Tile, float32_tile, in_registers

STRETCH = 512
"""Keys of a stretch."""
PROGRAMS = 264
"""Decode rows × KV heads up to which stretches are spread over programs."""


@triton.jit
def _join(acc, total, top, acc_s, total_s, top_s):
    """A running softmax with that of the next stretch."""
    new = tl.maximum(top, top_s)
    safe = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(top - safe), tl.exp2(top_s - safe)
    return acc * a[:, None] + acc_s * b[:, None], total * a + total_s * b, new


@triton.jit
def _seen(lowest, highest, seq_len, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr):
    """The keys [begin, last) that queries at positions `lowest` to `highest` see any of."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0)
    if CHUNK > 0:
        begin = tl.maximum(begin, lowest // CHUNK * CHUNK)
    return begin, (highest + 1 if CAUSAL else seq_len)


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "table_r", "slots"], do_not_specialize_on_alignment=STEP)
def _attend(q, k_pages, v_pages, out, part, lse, query_start, seq_lens, table, sinks, slopes, biases,
            scale, softcap, num_requests, num_blocks, slots, distances, q_t, q_h, o_t, o_h, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, table_r,
            HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, SINGLE: tl.constexpr,
            TILE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
            WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
            ALIBI: tl.constexpr, BIAS: tl.constexpr, SPREAD: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    """Blocks × KV heads, × stretches where SPREAD, whose results lie by request. SINGLE: a block is a request of one query token."""
    let_next_start(EARLY)
    kv_head = tl.program_id(1)
    request, first, queries, start = block_of(query_start, num_requests, num_blocks, BLOCK_Q, SINGLE)
    seq_len = tl.load(seq_lens + request)
    wait_for_last(EARLY)  # arrays of the step were there before; q, K and V are the last kernel's
    if start >= queries:
        return
    row, head, valid = rows_of(start, queries, kv_head, GROUP, BLOCK_Q, BLOCK_M)
    position = seq_len - queries + row
    token = (first + row).to(tl.int64)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    query = tl.load(q + token[:, None] * q_t + head[:, None] * q_h + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32)
    bias = biases + head * distances if BIAS else biases
    lowest = seq_len - queries + start
    begin, last = _seen(lowest, tl.minimum(lowest + BLOCK_Q - 1, seq_len - 1), seq_len, WINDOW, CHUNK, CAUSAL)
    lower, upper = begin // KEYS, tl.cdiv(last, KEYS)
    if SPREAD:
        lower = tl.maximum(lower, tl.program_id(2))
        upper = tl.minimum(upper, tl.program_id(2) + 1)
        if lower >= upper:
            return
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for stretch in range(lower, upper):
        low = tl.maximum(stretch * KEYS, begin // TILE * TILE)
        acc_s, total_s, top_s = walk(
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
            query, k_pages, v_pages, table + request * table_r, low, tl.minimum(stretch * KEYS + KEYS, last), begin, last, kv_head,
            position, valid, slope, scale, softcap, bias, distances - 1, kp_p, kp_t, kp_h, vp_p, vp_t, vp_h, TILE, PAGE, D, DV, BLOCK_D,
            BLOCK_DV, WINDOW, CHUNK, CAUSAL, SOFTCAP, ALIBI, BIAS, False, False, STAGES)  # fmt: skip
        if SPREAD:
            acc, total, top = acc_s, total_s, top_s
        else:
            acc, total, top = _join(acc, total, top, acc_s, total_s, top_s)
    if SPREAD:
        base = (request.to(tl.int64) * HEADS + head) * slots + lower
        keep(part, lse, base, dv, acc, total, top, valid[:, None] & (dv < DV)[None, :], valid, DV)
    else:
        result = divided(acc, total, top, sinks, head, valid, SINKS)
        tl.store(out + token[:, None] * o_t + head[:, None] * o_h + dv[None, :], result.to(out.dtype.element_ty),
                 mask=valid[:, None] & (dv < DV)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["query_start", "seq_lens"])
def _join_all(part, lse, out, query_start, seq_lens, sinks, slots, o_t, o_h, HEADS: tl.constexpr, DV: tl.constexpr,
              BLOCK_DV: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, SINKS: tl.constexpr,
              KEYS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Requests × heads: the stretches of one decode's output row, in order."""
    let_next_start(EARLY)
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.zeros([1], tl.int32)
    token = tl.load(query_start + request).to(tl.int64)
    queries = tl.load(query_start + request + 1) - token
    seq_len = tl.load(seq_lens + request)
    wait_for_last(EARLY)
    if queries != 1:
        return
    begin, last = _seen(seq_len - 1, seq_len - 1, seq_len, WINDOW, CHUNK, CAUSAL)
    dv = tl.arange(0, BLOCK_DV)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for stretch in range(begin // KEYS, tl.cdiv(last, KEYS)):
        base = (request * HEADS + head) * slots + stretch
        rows = tl.load(part + base[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        acc, total, top = _join(acc, total, top, rows, tl.load(lse + base * 2 + 1), tl.load(lse + base * 2))
    result = divided(acc, total, top, sinks, head, head >= 0, SINKS)
    tl.store(out + token * o_t + head[:, None] * o_h + dv[None, :], result.to(out.dtype.element_ty), mask=(dv < DV)[None, :])


class FixedPlan(NamedTuple):
    """A step of decodes alone, and the stretches that its programs share: 1 where each takes all of its own."""

    single: bool
    slots: int


class FixedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes, bias)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self.group = facts.num_heads // facts.num_kv_heads
        self.block_d = max(triton.next_power_of_2(facts.head_dim), 16)
        self.block_dv = max(triton.next_power_of_2(facts.v_dim), 16)

    def _tile(self, device: torch.device) -> tuple[int, int]:
        """Rows of a block and keys of a tile: the same for whatever a step holds."""
        facts, dim = self.facts, max(self.block_d, self.block_dv)
        rows, keys = (32, 32) if dim > 128 else (64, 64)
        if facts.dtype == "float32":
            rows, keys = float32_tile(rows, dim)[:2]
        elif facts.kv_dtype == "float8_e4m3fn" and waves_of_32(device):  # else its compiler works for minutes
            keys = in_registers(Tile(rows, keys, 4, 2, False), dim).keys
        return max(rows, triton.next_power_of_2(self.group)), keys

    def plan(self, batch: PagedBatch, buffers: FixedPlan | None = None) -> FixedPlan:
        """Few decodes spread their stretches, as many as the longest may have."""
        single = batch.max_query <= 1
        few = single and batch.seq_lens.shape[0] * self.facts.num_kv_heads <= PROGRAMS
        return FixedPlan(single, max(triton.cdiv(batch.max_seq, STRETCH), 1) if few else 1)

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: FixedPlan | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        facts, requests = self.facts, batch.seq_lens.shape[0]
        single, slots = plan or self.plan(batch)
        # Padding tokens belong to no request and no program writes them: zero is their finite number.
        make = torch.empty if single and q.shape[0] == requests else torch.zeros
        out = make(q.shape[0], facts.num_heads, facts.v_dim, dtype=q.dtype, device=q.device)
        if q.shape[0] == 0 or requests == 0:
            return out
        part = lse = out
        if slots > 1:
            part = torch.empty(requests, facts.num_heads, slots, facts.v_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(requests, facts.num_heads, slots, 2, dtype=torch.float32, device=q.device)
        block_m, tile = self._tile(q.device)
        block_q = 1 if single else max(block_m // self.group, 1)
        blocks = requests if single else q.shape[0] // block_q + requests
        seen = {"WINDOW": facts.window or 0, "CHUNK": facts.chunk or 0, "CAUSAL": facts.causal, "SINKS": sinks is not None}
        common = {"HEADS": facts.num_heads, "DV": facts.v_dim, "BLOCK_DV": self.block_dv, "KEYS": STRETCH, **seen, **early(q.device)}
        _attend[(blocks, facts.num_kv_heads, slots)](
            q, as_stored(k_pages), as_stored(v_pages), out, part, lse, batch.query_start, batch.seq_lens, batch.block_table,
            out if sinks is None else sinks, out if slopes is None else slopes, out if bias is None else bias.contiguous(),
            facts.scale, facts.softcap or 0.0, requests, blocks, slots, 1 if bias is None else bias.shape[1],
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            batch.block_table.stride(0),
            GROUP=self.group, BLOCK_Q=block_q, BLOCK_M=block_m, SINGLE=single, TILE=tile, PAGE=facts.page_size, D=facts.head_dim,
            BLOCK_D=self.block_d, SOFTCAP=facts.softcap is not None, ALIBI=slopes is not None, BIAS=bias is not None, SPREAD=slots > 1,
            STAGES=2, num_warps=4, num_stages=2, enable_fp_fusion=False, **common,
        )  # fmt: skip
        if slots > 1:
            _join_all[(requests, facts.num_heads)](
                part, lse, out, batch.query_start, batch.seq_lens, out if sinks is None else sinks, slots, out.stride(0), out.stride(1),
                enable_fp_fusion=False, **common,
            )  # fmt: skip
        return out
