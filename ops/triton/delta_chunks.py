"""The gated delta rule through chunks whose systems are solved (`delta_systems.py`): a walk with the state in registers.

Of a chunk with keys k, queries q, values v, decays from its beginning to token l, since[l], and from l to its end, later[l], and T, its
system solved: a token writes u = T · v − (T · (k · since)) · S, its output is (q · since) · S + weights · u, and what becomes of the state
is S · since[end] + (k · later)ᵀ · u. Where a head decays, since and later go into the products' results and into u.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.delta_systems import Inputs, Solved, systems
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.state_rows import SIZES, STEP, page_steps, rows_of, segment, state_of, step_args, tile_of


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _walk(q, k, solved_k, solved_v, weights, queries, keys, shrinks, state, out, query_start, fresh, read, write, few, read_r, write_r,
          q_t, q_h, k_t, k_h, s_page, s_h, s_k, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
          BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ALL_V: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
          STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Heads × blocks of the state's columns, × requests of more than `few` tokens. ALL_V: columns of a tile of values."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
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
    shared = head // (HEADS // K_HEADS)
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        there = start + each < end
        solved = tl.load(tile_of(solved_k, tile, each, channel, CHUNK, BLOCK_K))
        value = tl.load(tile_of(solved_v, tile, each, column, CHUNK, ALL_V))
        weight = tl.load(tile_of(weights, tile, each, each, CHUNK, CHUNK))
        if BY_CHANNEL:
            key = tl.load(tile_of(keys, tile, each, channel, CHUNK, BLOCK_K))
            query = tl.load(tile_of(queries, tile, each, channel, CHUNK, BLOCK_K))
            shrink = tl.load(shrinks + tile * BLOCK_K + channel)[:, None]
        else:
            key = rows_of(k + shared * k_h, start, end, k_t, channel, K, CHUNK)
            query = rows_of(q + shared * q_h, start, end, q_t, channel, K, CHUNK)
            later = tl.load(keys + tile * CHUNK + each)
            since = tl.load(queries + tile * CHUNK + each)
            shrink = tl.load(shrinks + tile)
        before = held.to(value.dtype)
        written = value.to(tl.float32) - tl.dot(solved, before, input_precision="ieee")
        result = tl.dot(query, before, input_precision="ieee")
        left = written
        if not BY_CHANNEL:
            left = written * later[:, None]
            result *= since[:, None]
        held = tl.dot(tl.trans(key), left.to(value.dtype), held * shrink, input_precision="ieee")
        result = tl.dot(weight, written.to(value.dtype), result, input_precision="ieee")
        target = out + ((start + each).to(tl.int64)[:, None] * HEADS + head) * V + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=there[:, None] & (column < V)[None, :])
        tile += HEADS
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


class Way(NamedTuple):
    """How both launches go: columns of a state that a program of the walk holds, its warps, and the most stages of its loop; warps of a
    program that solves a system (by channel twice as many), and the most registers of its threads."""

    columns: int
    warps: int
    stages: int
    solving: int = 4
    registers: int = 255


WAYS = (Way(32, 4, 3), Way(32, 4, 3, 4, 168), Way(32, 4, 3, 8), Way(64, 4, 2), Way(64, 8, 2), Way(16, 4, 3))
"""The one that is taken, and others that `benchmarks/gpu_state_variants.py` compares with it."""


def in_chunks(facts: DeltaFacts, inputs: Inputs, state: torch.Tensor, out: torch.Tensor, batch: StateBatch, few: int, way: Way) -> None:
    """Outputs and states of requests of more than `few` tokens."""
    solved = systems(facts, inputs, batch, few, way.solving * (2 if facts.by_channel else 1), way.registers)
    walk(facts, inputs, solved, state, out, batch, few, way)


def walk(
    facts: DeltaFacts, inputs: Inputs, solved: Solved, state: torch.Tensor, out: torch.Tensor, batch: StateBatch, few: int, way: Way
) -> None:
    chunk, block_k, all_v = solved.chunk, solved.solved_k.shape[-1], solved.solved_v.shape[-1]
    columns, width = min(all_v, way.columns), out.element_size()
    stage = chunk * (3 * block_k + columns + chunk) * width + 4 * max(block_k, 2 * chunk)
    beside = (2 * chunk + block_k) * columns * width
    _walk[(facts.heads * triton.cdiv(facts.v_dim, columns), batch.many)](
        inputs.q, inputs.k, *solved[1:], state, out, *step_args(batch), few, *page_steps(batch), *inputs.q.stride()[:2],
        *inputs.k.stride()[:2], *state.stride()[:3], HEADS=facts.heads, K_HEADS=facts.k_heads, K=facts.k_dim, V=facts.v_dim,
        BLOCK_K=block_k, BLOCK_V=columns, ALL_V=all_v, BY_CHANNEL=facts.by_channel, CHUNK=chunk,
        STAGES=fitting_stages(out.device, way.stages, stage, beside), num_warps=way.warps, **early(out.device),
    )  # fmt: skip
