"""The gated delta rule through chunks whose systems are solved: what each chunk needs of its keys, values and queries, then the walk.

Of a chunk with keys k, queries q, values v, decays from its beginning to token l, since[l], and from l to its end, later[l], and T, the
inverse of its system with the amounts: a token writes u = T · v − (T · (k · since)) · S, its output is (q · since) · S + weights · u, and
what becomes of the state is S · since[end] + (k · later)ᵀ · u. One launch makes all but S and u for all chunks at once, in tiles that lie
in memory as the walk reads them: its products take them as they come, and its threads hold the state and little else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.delta_systems import CHUNK, systems
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.paged_kernels import find_request
from pagoda.ops.triton.state_rows import SIZES, STEP, page_steps, segment, state_of, step_args
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["many", *SIZES], do_not_specialize_on_alignment=STEP)
def _tiles(q, k, v, decay, inverses, solved_k, solved_v, keys, queries, shrinks, query_start, many, few, q_t, q_h, k_t, k_h, v_t, v_h, g_t,
           g_h, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
           BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Chunks × heads; request r owns chunks as in `find_request`. What lies past a request's end, or past K or V, becomes 0."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    block, head = tl.program_id(0), tl.program_id(1)
    row = find_request(query_start, block, many, CHUNK)
    first, end = segment(query_start, row)
    start = first + (block - (first // CHUNK + row)) * CHUNK
    if (start >= end) | (end - first <= few):
        return
    NUMBER: tl.constexpr = inverses.dtype.element_ty
    shared = head // (HEADS // K_HEADS)
    each, channel, column = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    there = start + each < end
    at = (start + each).to(tl.int64)
    mask = there[:, None] & (channel < K)[None, :]
    place = block.to(tl.int64) * HEADS + head
    inverse = tl.load(inverses + place * (CHUNK * CHUNK) + each[:, None] * CHUNK + each[None, :])
    value = tl.load(v + at[:, None] * v_t + head * v_h + column[None, :], mask=there[:, None] & (column < V)[None, :], other=0.0)
    tile_v = place * (CHUNK * BLOCK_V) + each[:, None] * BLOCK_V + column[None, :]
    tl.store(solved_v + tile_v, tl.dot(inverse, value.to(NUMBER), input_precision="ieee").to(NUMBER))
    if BY_CHANNEL:
        step = tl.load(decay + at[:, None] * g_t + head * g_h + channel[None, :], mask=mask, other=0.0)
        so_far, total = tl.cumsum(step, 0), tl.sum(step, 0)
        since, later, shrink = tl.exp(so_far), tl.exp(total[None, :] - so_far), tl.exp(total)
    else:
        step = tl.load(decay + at * g_t + head, mask=there, other=0.0)
        so_far, total = tl.cumsum(step, 0), tl.sum(step, 0)
        since, later = tl.exp(so_far)[:, None], tl.exp(total - so_far)[:, None]
        shrink = tl.zeros([BLOCK_K], tl.float32) + tl.exp(total)
    tl.store(shrinks + place * BLOCK_K + channel, shrink)
    tile_k = place * (CHUNK * BLOCK_K) + each[:, None] * BLOCK_K + channel[None, :]
    query = tl.load(q + at[:, None] * q_t + shared * q_h + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(queries + tile_k, (query * since).to(NUMBER))
    key = tl.load(k + at[:, None] * k_t + shared * k_h + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(keys + tile_k, (key * later).to(NUMBER))
    tl.store(solved_k + tile_k, tl.dot(inverse, (key * since).to(NUMBER), input_precision="ieee").to(NUMBER))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _walk(solved_k, solved_v, keys, queries, shrinks, weights, state, out, query_start, fresh, read, write, few, read_r, write_r,
          s_page, s_h, s_k, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
          ALL_V: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Heads × blocks of the state's columns, × requests of more than `few` tokens. ALL_V: columns of a tile of values."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1)
    column = tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    channel, each = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    first, end = segment(query_start, row)
    if end - first <= few:
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    inside = (channel < K)[:, None] & (column < V)[None, :]
    place = state + head * s_h + channel.to(tl.int64)[:, None] * s_k + column[None, :]
    held = tl.load(place + page_in * s_page, mask=inside & kept, other=0.0)
    tile = (first // CHUNK + row).to(tl.int64) * HEADS + head
    wide, square = each[:, None] * BLOCK_K + channel[None, :], each[:, None] * CHUNK + each[None, :]
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        solved = tl.load(solved_k + tile * (CHUNK * BLOCK_K) + wide)
        value = tl.load(solved_v + tile * (CHUNK * ALL_V) + each[:, None] * ALL_V + column[None, :])
        key = tl.load(keys + tile * (CHUNK * BLOCK_K) + wide)
        query = tl.load(queries + tile * (CHUNK * BLOCK_K) + wide)
        weight = tl.load(weights + tile * (CHUNK * CHUNK) + square)
        shrink = tl.load(shrinks + tile * BLOCK_K + channel)
        before = held.to(value.dtype)
        written = (value.to(tl.float32) - tl.dot(solved, before, input_precision="ieee")).to(value.dtype)
        held = tl.dot(tl.trans(key), written, held * shrink[:, None], input_precision="ieee")
        result = tl.dot(query, before, input_precision="ieee")
        result = tl.dot(weight, written, result, input_precision="ieee")
        there = (start + each < end)[:, None] & (column < V)[None, :]
        target = out + ((start + each).to(tl.int64)[:, None] * HEADS + head) * V + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=there)
        tile += HEADS
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


class Way(NamedTuple):
    """How the walk goes: columns of a state that a program holds, its warps, and the most stages of its loop."""

    columns: int
    warps: int
    stages: int


WAYS = (Way(32, 4, 3), Way(32, 4, 2), Way(16, 4, 3), Way(64, 4, 2), Way(64, 8, 2), Way(32, 8, 3), Way(16, 2, 2), Way(32, 4, 1))
"""The one that is taken, and others that `benchmarks/gpu_states.py --variants` compares with it. Two warps use other instructions."""


def in_chunks(
    facts: DeltaFacts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    out: torch.Tensor, batch: StateBatch, few: int, way: Way,
) -> None:  # fmt: skip
    """Outputs and states of requests of more than `few` tokens. Tensors as `ops.delta.GatedDeltaReference` has them, their last dimension
    without gaps. Beside them it needs about 6 · K + 2 · V + 256 bytes a token and head in 16 bits, twice as many in 32."""
    inverses, weights = systems(facts, q, k, v, log_decay, beta, batch, few)
    chunks, heads, device = inverses.shape[0], facts.heads, v.device
    block_k, all_v = max(16, triton.next_power_of_2(facts.k_dim)), max(16, triton.next_power_of_2(facts.v_dim))
    solved_k, keys, queries = (torch.empty(chunks, heads, CHUNK, block_k, dtype=v.dtype, device=device) for _ in range(3))
    solved_v = torch.empty(chunks, heads, CHUNK, all_v, dtype=v.dtype, device=device)
    shrinks = torch.empty(chunks, heads, block_k, dtype=torch.float32, device=device)
    common: dict[str, Any] = {"HEADS": heads, "K": facts.k_dim, "V": facts.v_dim, "BLOCK_K": block_k, "CHUNK": CHUNK, **early(device)}
    _tiles[(chunks, heads)](
        q, k, v, log_decay, inverses, solved_k, solved_v, keys, queries, shrinks, batch.query_start, batch.many, few, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], *log_decay.stride()[:2], K_HEADS=facts.k_heads, BLOCK_V=all_v, BY_CHANNEL=facts.by_channel,
        num_warps=8, **common,
    )  # fmt: skip
    columns, width = min(all_v, way.columns), v.element_size()
    stage = CHUNK * (3 * block_k + columns + CHUNK) * width + 4 * block_k
    beside = (CHUNK + block_k) * columns * width
    _walk[(heads * triton.cdiv(facts.v_dim, columns), batch.many)](
        solved_k, solved_v, keys, queries, shrinks, weights, state, out, *step_args(batch), few, *page_steps(batch), *state.stride()[:3],
        BLOCK_V=columns, ALL_V=all_v, STAGES=fitting_stages(device, way.stages, stage, beside), num_warps=way.warps, **common,
    )  # fmt: skip
