"""`causal_conv1d` in Triton: blocks of tokens × channels, prompts and decodes in one kernel, states written where they are read."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.conv import ConvFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.paged_kernels import find_request
from pagoda.ops.triton.state_rows import SIZES, STEP, by_rows, page_steps, segment, state_of, step_args, zero_rest
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _conv(x, weight, bias, state, out, query_start, fresh, read, write, rows, tokens, read_r, write_r, x_t, s_page, s_c,
          C: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, SINGLE: tl.constexpr,
          BIAS: tl.constexpr, SILU: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """SINGLE: a block is a request of one token; otherwise request r owns blocks as in `find_request`, and one more has what is left.

    A request's first block alone reads its state, and writes it.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    if SINGLE:
        row = tl.program_id(0)
        first, end = segment(query_start, row)
        begin = first
        if row == rows - 1:
            zero_rest(out, C, channel, inside, end, tokens)
    else:
        block = tl.program_id(0)
        row = find_request(query_start, block, rows + 1, BLOCK_T)
        first = tl.load(query_start + row)
        begin = first + (block - (first // BLOCK_T + row)) * BLOCK_T
        end = tl.load(query_start + row + 1, mask=row < rows, other=tokens)
    if begin >= end:
        return
    token = begin + tl.arange(0, BLOCK_T)
    here = (token < end)[:, None] & inside[None, :]
    place = token.to(tl.int64)[:, None] * C + channel[None, :]
    if row == rows:
        tl.store(out + place, tl.zeros([BLOCK_T, BLOCK_C], out.dtype.element_ty), mask=here)
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    before = state + page_in * s_page + channel.to(tl.int64) * s_c
    offset = token - first
    line = x + token.to(tl.int64)[:, None] * x_t + channel[None, :]
    total = tl.load(line, mask=here, other=0.0).to(tl.float32)
    total *= tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(1, TAPS):
        own = (offset >= back)[:, None]
        value = tl.load(line - back * x_t, mask=here & own, other=0.0).to(tl.float32)
        old = tl.load(before[None, :] + (TAPS - 1 - back + offset)[:, None], mask=here & (own == 0) & kept, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * TAPS + TAPS - 1 - back, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(own, value, old) * tap[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + place, total.to(out.dtype.element_ty), mask=here)
    if begin == first:
        k = tl.arange(0, BLOCK_K)
        at = end - (TAPS - 1) + k
        wanted = inside[:, None] & (k < TAPS - 1)[None, :]
        latest = tl.load(x + at.to(tl.int64)[None, :] * x_t + channel[:, None], mask=wanted & (at >= first)[None, :], other=0.0)
        left = tl.load(before[:, None] + (at - first + TAPS - 1)[None, :], mask=wanted & (at < first)[None, :] & kept, other=0.0)
        # The page may be the one that was read, by other threads too.
        tl.debug_barrier()
        after = state + page_out * s_page + channel.to(tl.int64)[:, None] * s_c + k[None, :]
        tl.store(after, tl.where((at >= first)[None, :], latest.to(state.dtype.element_ty), left), mask=wanted)


class CausalConv(PlainKernel):
    """`run(packed, x, state, batch)`, as in `ops.conv.CausalConvReference`: the same bits for a token in whatever step it comes."""

    facts: ConvFacts

    def run(self, packed: Any, x: torch.Tensor, state: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        facts, tokens, rows = self.facts, x.shape[0], batch.read.shape[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        x, weight = by_rows(x), packed["weight"].contiguous()
        single = batch.max_query <= 1
        block_t, block_c = (1, 256 if rows < 32 else 1024) if single else (32, 128)
        blocks = rows if single else tokens // block_t + rows + 1
        _conv[(blocks, triton.cdiv(facts.channels, block_c))](
            x, weight, packed["bias"] if facts.bias else weight, state, out, *step_args(batch), rows, tokens, *page_steps(batch),
            x.stride(0), state.stride(0), state.stride(1), C=facts.channels, TAPS=facts.taps, BLOCK_T=block_t,
            BLOCK_C=min(block_c, triton.next_power_of_2(facts.channels)), BLOCK_K=triton.next_power_of_2(facts.taps - 1), SINGLE=single,
            BIAS=facts.bias, SILU=facts.activation == "silu", num_warps=4, enable_fp_fusion=False, **early(x.device),
        )  # fmt: skip
        return out
