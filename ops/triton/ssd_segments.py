"""`ssd_scan` of prompts in numbers of 16 bits: a walk that makes the states at borders of 128 tokens, then all outputs at once.

The walk does a third of the work, and nothing in it waits for a product but the sum it goes into: states, transposed and rounded, lie in
memory for the second launch, as many bytes as the inputs where a head has 64 · 128 numbers. There a program takes 64 tokens of some heads
that share b and c, whose products it makes once; of weights on the half before no exponentials are taken but of rows and columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.scan import SsdFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early, fitting_stages, registers
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_kernels import LOG2E
from pagoda.ops.triton.state_rows import SIZES, STEP, page_steps, piece_of, rows_of, segment, state_of, step_args, step_of, tile_of

ROWS = 64
"""Tokens of half a segment."""


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _borders(x, dt, bias, a, b, state, before, sums, owns, query_start, fresh, read, write, few, read_r, write_r, x_t, x_h, dt_t, b_t, b_g,
             s_page, s_h, s_p, HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr,
             BLOCK_N: tl.constexpr, ALL_P: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, STEPS: tl.constexpr,
             STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Heads × blocks of their rows, × requests of more than `few` tokens. before: `[segments, HEADS, BLOCK_N, ALL_P]`, states where a
    segment begins. sums: `[segments, HEADS, 2 · ROWS]`, binary logarithms of decays since then; owns: the same less that of dt. Writes the
    last state."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    SEGMENT: tl.constexpr = 2 * ROWS
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1)
    p = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n, each = tl.arange(0, BLOCK_N), tl.arange(0, SEGMENT)
    first, end = segment(query_start, row)
    if end - first <= few:
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    inside = (n < N)[:, None] & (p < P)[None, :]
    place = state + head * s_h + p.to(tl.int64)[None, :] * s_p + n[:, None]
    held = tl.load(place + page_in * s_page, mask=inside & kept, other=0.0)
    rate, shift = tl.load(a + head) * LOG2E, tl.load(bias + head)
    group = head // (HEADS // GROUPS)
    tile = (first // SEGMENT + row).to(tl.int64) * HEADS + head
    for start in tl.range(first, end, SEGMENT, num_stages=STAGES):
        there = start + each < end
        at = (start + each).to(tl.int64)
        step = step_of(dt + at * dt_t + head, there, shift, LOW, HIGH, STEPS)
        value = rows_of(x + head * x_h, start, end, x_t, p, P, SEGMENT)
        added = rows_of(b + group * b_g, start, end, b_t, n, N, SEGMENT)
        tl.store(tile_of(before, tile, n, p, BLOCK_N, ALL_P), held.to(before.dtype.element_ty))
        so_far, total = tl.cumsum(step * rate, 0), tl.sum(step * rate, 0)
        tl.store(sums + tile * SEGMENT + each, so_far)
        tl.store(owns + tile * SEGMENT + each, so_far - tl.log2(step))
        scaled = (value.to(tl.float32) * (tl.exp2(total - so_far) * step)[:, None]).to(value.dtype)
        held = tl.dot(tl.trans(added.to(value.dtype)), scaled, held * tl.exp2(total), input_precision="ieee")
        tile += HEADS
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


@triton.jit
def _weights(products, since, own, skip, ROWS: tl.constexpr):
    """What the outputs of ROWS tokens have of their own inputs."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    return products * tl.exp2(tl.where(row >= column, since[:, None] - own[None, :], float("-inf"))) + tl.where(row == column, skip, 0.0)


@triton.jit(do_not_specialize=["many", "few"], do_not_specialize_on_alignment=["query_start"])
def _outputs(x, b, c, d, before, sums, owns, out, query_start, many, few, x_t, x_h, b_t, b_g, c_t, c_g, HEADS: tl.constexpr,
             GROUPS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ALL_P: tl.constexpr,
             ROWS: tl.constexpr, PER: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Blocks of rows of PER heads of a group × halves of segments; request r owns segments as in `piece_of`. SKIP: there is d.
    Neighbours have a token's neighbouring heads, whose numbers lie side by side and whose b and c are the same.

    A later half has the earlier one before it; an earlier one has zeros there.
    """
    let_next_start(EARLY)
    wait_for_last(EARLY)
    SEGMENT: tl.constexpr = 2 * ROWS
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    block, late = tl.program_id(1) // 2, tl.program_id(1) % 2
    begin = tl.program_id(0) // BLOCKS * PER
    p = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n, each = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    border, end = piece_of(query_start, block, many, few, SEGMENT)
    start = border + late * ROWS
    if start >= end:
        return
    NUMBER: tl.constexpr = before.dtype.element_ty
    group = begin // (HEADS // GROUPS)
    asked = rows_of(c + group * c_g, start, end, c_t, n, N, ROWS).to(NUMBER)
    own = rows_of(b + group * b_g, start, end, b_t, n, N, ROWS).to(NUMBER)
    own_products = tl.dot(asked, tl.trans(own), input_precision="ieee")
    other = rows_of(b + group * b_g, border, start, b_t, n, N, ROWS).to(NUMBER)
    products = tl.dot(asked, tl.trans(other), input_precision="ieee")
    tile = block.to(tl.int64) * HEADS + begin
    skip = 0.0
    for head in tl.range(begin, begin + PER, num_stages=STAGES):
        held = tl.load(tile_of(before, tile, n, p, BLOCK_N, ALL_P))
        value = rows_of(x + head * x_h, start, end, x_t, p, P, ROWS)
        other_value = rows_of(x + head * x_h, border, start, x_t, p, P, ROWS)
        since = tl.load(sums + tile * SEGMENT + late * ROWS + each)
        until = tl.load(owns + tile * SEGMENT + late * ROWS + each)
        other_until = tl.load(owns + tile * SEGMENT + each, mask=each < late * ROWS, other=float("inf"))
        middle = tl.load(sums + tile * SEGMENT + ROWS - 1, mask=late == 1, other=0.0)
        if SKIP:
            skip = tl.load(d + head)
        weight = (products * tl.exp2(middle - other_until)[None, :]).to(NUMBER)
        result = tl.dot(asked, held, input_precision="ieee") * tl.exp2(middle)
        result = tl.dot(weight, other_value, result, input_precision="ieee") * tl.exp2(since - middle)[:, None]
        weight = _weights(own_products, since, until, skip, ROWS).to(NUMBER)
        result = tl.dot(weight, value, result, input_precision="ieee")
        target = out + (start.to(tl.int64) * HEADS + head) * P + each[:, None] * (HEADS * P) + p[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=(start + each < end)[:, None] & (p < P)[None, :])
        tile += 1


class Way(NamedTuple):
    """How both launches go: rows of a state that a program of the first holds, its warps, the most stages of its loop; heads of a program
    of the second, its warps and stages, and the most registers of its threads."""

    rows: int
    warps: int
    stages: int
    heads: int
    out_warps: int
    out_stages: int
    out_registers: int = 255


WAYS = (
    Way(64, 4, 3, 8, 4, 2), Way(64, 4, 3, 4, 4, 2), Way(64, 4, 3, 4, 4, 1, 168), Way(64, 4, 3, 4, 8, 2, 128), Way(32, 4, 3, 8, 4, 3),
    Way(64, 4, 2, 4, 8, 2),
)  # fmt: skip
"""The one that is taken, and others that `benchmarks/gpu_state_variants.py` compares with it."""


def in_segments(
    facts: SsdFacts, x: torch.Tensor, step: torch.Tensor | None, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    c: torch.Tensor, d: torch.Tensor | None, state: torch.Tensor, out: torch.Tensor, batch: StateBatch, few: int, way: Way,
) -> None:  # fmt: skip
    """Outputs and states of requests of more than `few` tokens. Tensors as `ops.scan.SsdScanReference` has them, their last dimension
    without gaps. Beside them it needs P · N / 64 + 8 bytes a token and head."""
    heads, device, width = facts.heads, x.device, x.element_size()
    segments = x.shape[0] // (2 * ROWS) + batch.many
    block_n, all_p = max(16, triton.next_power_of_2(facts.state)), max(16, triton.next_power_of_2(facts.head_dim))
    before = torch.empty(segments, heads, block_n, all_p, dtype=x.dtype, device=device)
    sums, owns = (torch.empty(segments, heads, 2 * ROWS, dtype=torch.float32, device=device) for _ in range(2))
    common: dict[str, Any] = {
        "HEADS": heads, "GROUPS": facts.groups, "P": facts.head_dim, "N": facts.state, "BLOCK_N": block_n, "ALL_P": all_p, "ROWS": ROWS,
        **early(device),
    }  # fmt: skip
    rows = min(all_p, way.rows)
    stage, beside = 2 * ROWS * (rows + block_n) * width, (2 * ROWS + block_n) * rows * width
    _borders[(heads * triton.cdiv(facts.head_dim, rows), batch.many)](
        x, x if step is None else step, a if bias is None else bias, a, b, state, before, sums, owns, *step_args(batch), few,
        *page_steps(batch), *x.stride()[:2], 0 if step is None else step.stride(0), *b.stride()[:2], *state.stride()[:3], BLOCK_P=rows,
        LOW=facts.limits[0], HIGH=facts.limits[1], STEPS=step is not None, STAGES=fitting_stages(device, way.stages, stage, beside),
        num_warps=way.warps, **common,
    )  # fmt: skip
    rows, together = min(all_p, 64), heads // facts.groups
    per = max(count for count in range(1, way.heads + 1) if together % count == 0)
    stage, beside = (block_n + 2 * ROWS) * rows * width, ROWS * (3 * block_n + rows) * width
    _outputs[(heads // per * triton.cdiv(facts.head_dim, rows), 2 * segments)](
        x, b, c, a if d is None else d, before, sums, owns, out, batch.query_start, batch.many, few, *x.stride()[:2], *b.stride()[:2],
        *c.stride()[:2], BLOCK_P=rows, PER=per, SKIP=d is not None, STAGES=fitting_stages(device, way.out_stages, stage, beside),
        num_warps=way.out_warps, **registers(device, way.out_registers), **common,
    )  # fmt: skip
