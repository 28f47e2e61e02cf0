"""`gated_delta_rule` in Triton: a few tokens one after the other on the state in registers; more in chunks of 64 (arXiv:2412.06464).

What the tokens of a chunk write is a unit lower triangular system's solution, which does not depend on the state: one launch solves the
systems of all chunks (`delta_systems.py`), another walks through each request's chunks with the state in registers (`delta_chunks.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.delta import DeltaFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.delta_chunks import WAYS, in_chunks
from pagoda.ops.triton.delta_systems import Inputs, amount_of, over_length
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last
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
    softplus,
    state_of,
    step_args,
    zero_rest,
)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _steps(q, k, v, step, beta, bias, rates, state, out, query_start, fresh, read, write, rows, tokens, few, read_r, write_r,
           q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, s_page, s_h, s_k, HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr,
           V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, DOUBLE: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Heads × blocks of their columns, × requests; those of more than `few` tokens are left alone."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
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
    rate = tl.load(rates + head)
    if BY_CHANNEL:
        shift = tl.load(bias + head * K + channel, mask=channel < K, other=0.0)
    else:
        shift = tl.load(bias + head)
    for token in range(first, end):
        at = tl.cast(token, tl.int64)
        key = tl.load(k + at * k_t + shared * k_h + channel, mask=channel < K, other=0.0).to(tl.float32)
        query = tl.load(q + at * q_t + shared * q_h + channel, mask=channel < K, other=0.0).to(tl.float32)
        value = tl.load(v + at * v_t + head * v_h + column, mask=column < V, other=0.0).to(tl.float32)
        key *= over_length(tl.sum(key * key, 0))
        query *= over_length(tl.sum(query * query, 0)) * K**-0.5
        amount = amount_of(tl.load(beta + at * beta_t + head), DOUBLE)
        if BY_CHANNEL:
            moved = tl.load(step + at * g_t + head * g_h + channel, mask=channel < K, other=0.0).to(tl.float32)
            held *= tl.exp(softplus(moved + shift) * rate)[:, None]
        else:
            held *= tl.exp(softplus(tl.load(step + at * g_t + head).to(tl.float32) + shift) * rate)
        held += key[:, None] * (amount * (value - tl.sum(held * key[:, None], 0)))[None, :]
        result = tl.sum(held * query[:, None], 0)
        tl.store(out + (at * HEADS + head) * V + column, result.to(out.dtype.element_ty), mask=column < V)
    # The page may be the one that was read, by other threads too.
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


class GatedDelta(PlainKernel):
    """`run(q, k, v, step, beta, bias, rates, state, batch)`, as in `ops.delta.GatedDeltaReference`."""

    facts: DeltaFacts
    way = WAYS[0]
    few = FEW
    fused = True

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, beta: torch.Tensor, bias: torch.Tensor,
        rates: torch.Tensor, state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        tokens, rows = v.shape[0], batch.read.shape[0]
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        q, k, v, step, beta = (by_rows(tensor) for tensor in (q, k, v, step, beta))
        inputs = Inputs(q, k, v, step, beta, bias.contiguous(), rates)
        self._one_by_one(inputs, state, out, batch)
        if batch.max_query > self.few:
            in_chunks(self.facts, inputs, state, out, batch, self.few, self.way)
        return out

    @property
    def sizes(self) -> dict[str, Any]:
        facts = self.facts
        sizes = {"HEADS": facts.heads, "K_HEADS": facts.k_heads, "K": facts.k_dim, "V": facts.v_dim}
        return {**sizes, "BY_CHANNEL": facts.by_channel, "DOUBLE": facts.double}

    def _block_v(self, rows: int) -> int:
        """Columns of the state that a program takes."""
        return block_of(self.facts.v_dim, self.facts.k_dim, rows * self.facts.heads)

    def _one_by_one(self, inputs: Inputs, state: torch.Tensor, out: torch.Tensor, batch: StateBatch) -> None:
        rows = batch.read.shape[0]
        block = self._block_v(rows)
        _steps[(self.facts.heads * triton.cdiv(self.facts.v_dim, block), rows)](
            *inputs, state, out, *step_args(batch), rows, out.shape[0], self.few, *page_steps(batch), *inputs.steps,
            *state.stride()[:3], BLOCK_K=triton.next_power_of_2(self.facts.k_dim), BLOCK_V=block, num_warps=4, **self.sizes,
            enable_fp_fusion=self.fused, **early(out.device),
        )  # fmt: skip


class GatedDeltaFixed(GatedDelta):
    """The same, every token by itself and in one order: a request's numbers depend neither on company nor on where prompts are cut."""

    few = ALL
    fused = False

    def _block_v(self, rows: int) -> int:
        return super()._block_v(PROGRAMS)
