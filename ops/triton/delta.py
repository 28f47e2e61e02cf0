"""`gated_delta_rule` in Triton: a few tokens one after the other on the state in registers; more in chunks of 64 (arXiv:2412.06464).

What the tokens of a chunk write is a unit lower triangular system's solution, which does not depend on the state: one launch inverts the
systems of all chunks, in blocks of 16 (`delta_systems.py`). Another walks through each request's chunks with the state in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.delta_systems import CHUNK, systems
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.state_rows import (
    ALL,
    FEW,
    PROGRAMS,
    SIZES,
    STEP,
    block_of,
    by_rows,
    page_steps,
    segment,
    state_of,
    step_args,
    zero_rest,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _steps(q, k, v, decay, beta, state, out, query_start, fresh, read, write, rows, tokens, few, read_r, write_r,
           q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, s_page, s_h, s_k, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr,
           V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Heads × blocks of their columns, × requests; those of more than `few` tokens are left alone."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1)
    column = tl.program_id(0) % BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    first, end = segment(query_start, row)
    if row == rows - 1:
        zero_rest(out, HEADS * V, head * V + column, column < V, end, tokens)
    if (end == first) | (end - first > few):
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    inside = (channel < K)[:, None] & (column < V)[None, :]
    place = state + head * s_h + channel.to(tl.int64)[:, None] * s_k + column[None, :]
    held = tl.load(place + page_in * s_page, mask=inside & kept, other=0.0)
    shared = head // (HEADS // K_HEADS)
    for token in range(first, end):
        at = tl.cast(token, tl.int64)
        key = tl.load(k + at * k_t + shared * k_h + channel, mask=channel < K, other=0.0).to(tl.float32)
        query = tl.load(q + at * q_t + shared * q_h + channel, mask=channel < K, other=0.0).to(tl.float32)
        value = tl.load(v + at * v_t + head * v_h + column, mask=column < V, other=0.0).to(tl.float32)
        amount = tl.load(beta + at * beta_t + head).to(tl.float32)
        if BY_CHANNEL:
            held *= tl.exp(tl.load(decay + at * g_t + head * g_h + channel, mask=channel < K, other=0.0))[:, None]
        else:
            held *= tl.exp(tl.load(decay + at * g_t + head))
        held += key[:, None] * (amount * (value - tl.sum(held * key[:, None], 0)))[None, :]
        result = tl.sum(held * query[:, None], 0)
        tl.store(out + (at * HEADS + head) * V + column, result.to(out.dtype.element_ty), mask=column < V)
    # The page may be the one that was read, by other threads too.
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _chunks(q, k, v, decay, state, out, inverses, weights, query_start, fresh, read, write, few, read_r, write_r,
            q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, s_page, s_h, s_k, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr,
            V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, CHUNK: tl.constexpr,
            STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The same for requests of more than `few` tokens, whose systems are solved: inverses, weights `[chunks, HEADS, CHUNK, CHUNK]`."""
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
    shared = head // (HEADS // K_HEADS)
    lower = each[:, None] >= each[None, :]
    square = ((first // CHUNK + row).to(tl.int64) * HEADS + head) * (CHUNK * CHUNK) + each[:, None] * CHUNK + each[None, :]
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        there = start + each < end
        at = (start + each).to(tl.int64)
        mask = there[:, None] & (channel < K)[None, :]
        value = tl.load(v + at[:, None] * v_t + head * v_h + column[None, :], mask=there[:, None] & (column < V)[None, :], other=0.0)
        key = tl.load(k + at[:, None] * k_t + shared * k_h + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        query = tl.load(q + at[:, None] * q_t + shared * q_h + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + square, mask=lower, other=0.0)
        weight = tl.load(weights + square, mask=lower, other=0.0)
        if BY_CHANNEL:
            each_decay = tl.load(decay + at[:, None] * g_t + head * g_h + channel[None, :], mask=mask, other=0.0)
            so_far, total = tl.cumsum(each_decay, 0), tl.sum(each_decay, 0)
            since, later = tl.exp(so_far), tl.exp(total[None, :] - so_far)
            shrink = tl.exp(total)[:, None]
        else:
            each_decay = tl.load(decay + at * g_t + head, mask=there, other=0.0)
            so_far, total = tl.cumsum(each_decay, 0), tl.sum(each_decay, 0)
            since, later = tl.exp(so_far)[:, None], tl.exp(total - so_far)[:, None]
            shrink = tl.exp(total)
        before = held.to(value.dtype)
        missing = value.to(tl.float32) - tl.dot((key * since).to(value.dtype), before, input_precision="ieee")
        written = tl.dot(inverse, missing.to(value.dtype), input_precision="ieee").to(value.dtype)
        result = tl.dot((query * since).to(value.dtype), before, input_precision="ieee")
        result = tl.dot(weight, written, result, input_precision="ieee")
        target = out + (at[:, None] * HEADS + head) * V + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=there[:, None] & (column < V)[None, :])
        held = tl.dot(tl.trans((key * later).to(value.dtype)), written, held * shrink, input_precision="ieee")
        square += HEADS * CHUNK * CHUNK
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


class Inputs(NamedTuple):
    """Arguments of a launch as `run` has them, their last dimension without gaps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    @property
    def steps(self) -> tuple[int, ...]:
        """`q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h`."""
        return (*self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2], *self.log_decay.stride()[:2])


class GatedDelta(PlainKernel):
    """`run(q, k, v, log_decay, beta, state, batch)`, as in `ops.delta.GatedDeltaReference`."""

    facts: DeltaFacts
    few = FEW
    fused = True

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor,
        state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        tokens, rows = v.shape[0], batch.read.shape[0]
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        inputs = Inputs(*(by_rows(tensor) for tensor in (q, k, v, log_decay, beta)))
        self._one_by_one(inputs, state, out, batch)
        if batch.max_query > self.few:
            self._in_chunks(inputs, state, out, batch)
        return out

    @property
    def sizes(self) -> dict[str, Any]:
        facts = self.facts
        return {"HEADS": facts.heads, "K_HEADS": facts.k_heads, "K": facts.k_dim, "V": facts.v_dim, "BY_CHANNEL": facts.by_channel}

    def _block_v(self, rows: int) -> int:
        """Columns of the state that a program takes."""
        return block_of(self.facts.v_dim, self.facts.k_dim, rows * self.facts.heads)

    def _one_by_one(self, inputs: Inputs, state: torch.Tensor, out: torch.Tensor, batch: StateBatch) -> None:
        rows = batch.read.shape[0]
        block = self._block_v(rows)
        _steps[(self.facts.heads * triton.cdiv(self.facts.v_dim, block), rows)](
            *inputs, state, out, *step_args(batch), rows, out.shape[0], self.few, *page_steps(batch), *inputs.steps, inputs.beta.stride(0),
            *state.stride()[:3], BLOCK_K=triton.next_power_of_2(self.facts.k_dim), BLOCK_V=block, num_warps=4, **self.sizes,
            enable_fp_fusion=self.fused, **early(out.device),
        )  # fmt: skip

    def _in_chunks(self, inputs: Inputs, state: torch.Tensor, out: torch.Tensor, batch: StateBatch) -> None:
        facts, width = self.facts, out.element_size()
        inverses, weights = systems(facts, *inputs, batch, self.few)
        block_k, block_v = max(16, triton.next_power_of_2(facts.k_dim)), max(16, min(triton.next_power_of_2(facts.v_dim), 32))
        q, k, v, log_decay, _ = inputs
        stage = CHUNK * (block_k * (q.element_size() + k.element_size() + 4 * facts.by_channel) + (2 * CHUNK + block_v) * width)
        beside = (CHUNK + block_v) * block_k * width
        _chunks[(facts.heads * triton.cdiv(facts.v_dim, block_v), batch.many)](
            q, k, v, log_decay, state, out, inverses, weights, *step_args(batch), self.few, *page_steps(batch), *inputs.steps,
            *state.stride()[:3], BLOCK_K=block_k, BLOCK_V=block_v, CHUNK=CHUNK, STAGES=fitting_stages(out.device, 3, stage, beside),
            num_warps=8, **self.sizes, **early(out.device),
        )  # fmt: skip


class GatedDeltaFixed(GatedDelta):
    """The same, every token by itself and in one order: a request's numbers depend neither on company nor on where prompts are cut."""

    few = ALL
    fused = False

    def _block_v(self, rows: int) -> int:
        return super()._block_v(PROGRAMS)
