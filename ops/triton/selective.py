"""`selective_scan` in Triton: a few tokens one after the other on the state in registers, more by prefix sums along 16 tokens at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.scan import SelectiveScanFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.state_rows import ALL, FEW, SIZES, STEP, by_rows, page_steps, segment, state_of, step_args, zero_rest

SPAN = 16
"""Tokens of a prefix sum."""


@triton.jit
def _after(decay, added, later_decay, later_added):
    """Two stretches of h = decay · h + added as one."""
    return decay * later_decay, added * later_decay + later_added


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _scan(x, dt, a, b, c, d, state, out, query_start, fresh, read, write, rows, tokens, few, read_r, write_r, x_t, dt_t, b_t, c_t,
          s_page, s_d, D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """Blocks of channels × requests; tokens of those of more than `few` are taken SPAN at a time."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(1)
    channel, n = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    inside = (channel < D)[:, None] & (n < N)[None, :]
    first, end = segment(query_start, row)
    if row == rows - 1:
        zero_rest(out, D, channel, channel < D, end, tokens)
    if first == end:
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    place = state + channel.to(tl.int64)[:, None] * s_d + n[None, :]
    held = tl.load(place + page_in * s_page, mask=inside & kept, other=0.0)
    rate = tl.load(a + channel[:, None] * N + n[None, :], mask=inside, other=0.0)
    skip = tl.load(d + channel, mask=channel < D, other=0.0)
    if end - first <= few:
        for token in range(first, end):
            at = tl.cast(token, tl.int64)
            value = tl.load(x + at * x_t + channel, mask=channel < D, other=0.0).to(tl.float32)
            step = tl.load(dt + at * dt_t + channel, mask=channel < D, other=0.0).to(tl.float32)
            added = tl.load(b + at * b_t + n, mask=n < N, other=0.0).to(tl.float32)
            asked = tl.load(c + at * c_t + n, mask=n < N, other=0.0).to(tl.float32)
            held = held * tl.exp(step[:, None] * rate) + (step * value)[:, None] * added[None, :]
            result = tl.sum(held * asked[None, :], 1) + skip * value
            tl.store(out + at * D + channel, result.to(out.dtype.element_ty), mask=channel < D)
    else:
        each = tl.arange(0, SPAN)
        for start in range(first, end, SPAN):
            there = start + each < end
            at = (start + each).to(tl.int64)
            mask = there[:, None] & (channel < D)[None, :]
            value = tl.load(x + at[:, None] * x_t + channel[None, :], mask=mask, other=0.0).to(tl.float32)
            step = tl.load(dt + at[:, None] * dt_t + channel[None, :], mask=mask, other=0.0).to(tl.float32)
            few_n = there[:, None] & (n < N)[None, :]
            added = tl.load(b + at[:, None] * b_t + n[None, :], mask=few_n, other=0.0).to(tl.float32)
            asked = tl.load(c + at[:, None] * c_t + n[None, :], mask=few_n, other=0.0).to(tl.float32)
            decay, sums = tl.associative_scan(
                (tl.exp(step[:, :, None] * rate[None, :, :]), (step * value)[:, :, None] * added[:, None, :]), 0, _after
            )
            states = sums + decay * held[None, :, :]
            result = tl.sum(states * asked[:, None, :], 2) + value * skip[None, :]
            tl.store(out + at[:, None] * D + channel[None, :], result.to(out.dtype.element_ty), mask=mask)
            held = tl.sum(tl.where((each == SPAN - 1)[:, None, None], states, 0.0), 0)
    # The page may be the one that was read, by other threads too.
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


class SelectiveScan(PlainKernel):
    """`run(x, dt, a, b, c, d, state, batch)`, as in `ops.scan.SelectiveScanReference`."""

    facts: SelectiveScanFacts
    few = FEW
    fused = True

    def run(
        self, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor,
        state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        facts, tokens, rows = self.facts, x.shape[0], batch.read.shape[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        x, dt, b, c = (by_rows(tensor) for tensor in (x, dt, b, c))
        block_n = triton.next_power_of_2(facts.state)
        block_d = min(triton.next_power_of_2(facts.channels), max(4, 256 // block_n))
        _scan[(triton.cdiv(facts.channels, block_d), rows)](
            x, dt, a.contiguous(), b, c, d, state, out, *step_args(batch), rows, tokens, self.few, *page_steps(batch), x.stride(0),
            dt.stride(0), b.stride(0), c.stride(0), *state.stride()[:2], D=facts.channels, N=facts.state, BLOCK_D=block_d,
            BLOCK_N=block_n, SPAN=SPAN, num_warps=4, enable_fp_fusion=self.fused, **early(x.device),
        )  # fmt: skip
        return out


class SelectiveScanFixed(SelectiveScan):
    """The same, every token by itself and in one order: a request's numbers depend neither on company nor on where prompts are cut."""

    few = ALL
    fused = False
