"""`causal_conv1d` in Triton: a thread has some channels, of one token or of many in a row; states are written where they are read.

Neighbouring threads have neighbouring channels: of a token, of a tap's weights (packed by taps), and of a state, where its channels lie
side by side as models keep them. A state with other steps is right, and slower.
"""

# ruff: noqa: RUF005 - Triton's tuples are not unpacked, and grow as Python's types do not
# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.conv import ConvFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.paged_kernels import find_request
from pagoda.ops.triton.state_rows import SIZES, STEP, by_rows, page_steps, segment, sigmoid, state_of, step_args, zero_rest


@triton.jit
def _finished(total, bias, channel, inside, BIAS: tl.constexpr, SILU: tl.constexpr):
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total *= sigmoid(total)
    return total


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _ones(x, weight, bias, state, out, query_start, fresh, read, write, rows, tokens, read_r, write_r, x_t, s_page, s_c, s_k,
          C: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """Blocks of channels × requests of one token, or of none."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    row = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    first, end = segment(query_start, row)
    if row == rows - 1:
        zero_rest(out, C, channel, inside, end, tokens)
    if first >= end:
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    before = state + page_in * s_page + channel.to(tl.int64) * s_c
    after = state + page_out * s_page + channel.to(tl.int64) * s_c
    at = first.to(tl.int64)
    own = tl.load(x + at * x_t + channel, mask=inside, other=0.0)
    total = own.to(tl.float32) * tl.load(weight + (TAPS - 1) * C + channel, mask=inside, other=0.0).to(tl.float32)
    older = ()
    for back in tl.static_range(1, TAPS):
        older = older + (tl.load(before + (TAPS - 1 - back) * s_k, mask=inside & kept, other=0.0),)
        factor = tl.load(weight + (TAPS - 1 - back) * C + channel, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(older[back - 1].to(tl.float32), factor, total)
    tl.store(out + at * C + channel, _finished(total, bias, channel, inside, BIAS, SILU).to(out.dtype.element_ty), mask=inside)
    # The page may be the one that was read, by other threads too.
    tl.debug_barrier()
    for back in tl.static_range(2, TAPS):
        tl.store(after + (TAPS - 1 - back) * s_k, older[back - 2], mask=inside)
    tl.store(after + (TAPS - 2) * s_k, own.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _earlier(x, before, first, at, kept, x_t, s_k, channel, inside, TAPS: tl.constexpr):
    """A request's input at place `at`, which may lie before its first token: in its state."""
    own = tl.load(x + at.to(tl.int64) * x_t + channel, mask=inside & (at >= first), other=0.0)
    kept_one = tl.load(before + (at - first + TAPS - 1) * s_k, mask=inside & kept & (at < first), other=0.0)
    return tl.where(at >= first, own, kept_one.to(own.dtype))


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _many(x, weight, bias, state, out, query_start, fresh, read, write, rows, tokens, read_r, write_r, x_t, s_page, s_c, s_k,
          C: tl.constexpr, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, AHEAD: tl.constexpr, BIAS: tl.constexpr,
          SILU: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Blocks of channels × of tokens; request r owns those as in `find_request`, and one more has what is left.

    A thread goes through the tokens with its channels' weights and last inputs in registers, AHEAD of them on their way at a time. A
    request's first block alone reads its state, and writes it.
    """
    let_next_start(EARLY)
    wait_for_last(EARLY)
    block = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    row = find_request(query_start, block, rows + 1, BLOCK_T)
    first = tl.load(query_start + row)
    begin = first + (block - (first // BLOCK_T + row)) * BLOCK_T
    end = tl.load(query_start + row + 1, mask=row < rows, other=tokens)
    if begin >= end:
        return
    last = tl.minimum(begin + BLOCK_T, end)
    if row == rows:
        zero_rest(out, C, channel, inside, begin, last)
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    before = state + page_in * s_page + channel.to(tl.int64) * s_c
    factors = ()
    held = ()
    for tap in tl.static_range(TAPS):
        factors = factors + (tl.load(weight + tap * C + channel, mask=inside, other=0.0).to(tl.float32),)
    for tap in tl.static_range(TAPS - 1):
        held = held + (_earlier(x, before, first, begin - (TAPS - 1) + tap, kept, x_t, s_k, channel, inside, TAPS).to(tl.float32),)
    if begin == first:
        latest = ()
        for tap in tl.static_range(TAPS - 1):
            latest = latest + (_earlier(x, before, first, end - (TAPS - 1) + tap, kept, x_t, s_k, channel, inside, TAPS),)
        # The page may be the one that was read, by other threads too.
        tl.debug_barrier()
        after = state + page_out * s_page + channel.to(tl.int64) * s_c
        for tap in tl.static_range(TAPS - 1):
            tl.store(after + tap * s_k, latest[tap].to(state.dtype.element_ty), mask=inside)
    line = x + begin.to(tl.int64) * x_t + channel
    target = out + begin.to(tl.int64) * C + channel
    for at in range(begin, last, AHEAD):
        coming = ()
        for i in tl.static_range(AHEAD):
            coming = coming + (tl.load(line + i * x_t, mask=inside & (at + i < last), other=0.0),)
        for i in tl.static_range(AHEAD):
            now = coming[i].to(tl.float32)
            total = now * factors[TAPS - 1]
            for back in tl.static_range(1, TAPS):
                total = tl.fma(held[TAPS - 1 - back], factors[TAPS - 1 - back], total)
            total = _finished(total, bias, channel, inside, BIAS, SILU)
            tl.store(target + i * C, total.to(out.dtype.element_ty), mask=inside & (at + i < last))
            held = held[1:] + (now,)
        line += AHEAD * x_t
        target += AHEAD * C


class Tile(NamedTuple):
    """Channels of a program, and its warps; of steps with prompts its tokens, and how many of them are on their way at a time."""

    channels: int
    warps: int
    tokens: int = 1
    ahead: int = 1


class CausalConv(PlainKernel):
    """`run(packed, x, state, batch)`, as in `ops.conv.CausalConvReference`: the same bits for a token in whatever step it comes.

    Attributes:
        one: tiles of a few decodes. many: of more. prompt: of steps with prompts.
    """

    facts: ConvFacts
    one = Tile(256, 1)
    many = Tile(1024, 4)
    prompt = Tile(512, 4, 32, 8)

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        """`weight [taps, C]`, and the bias."""
        return super().pack({**weights, "weight": weights["weight"].t().contiguous()}, out)

    def run(self, packed: Any, x: torch.Tensor, state: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        facts, tokens, rows = self.facts, x.shape[0], batch.read.shape[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        x, weight = by_rows(x), packed["weight"]
        single = batch.max_query <= 1
        tile = (self.one if rows < 32 else self.many) if single else self.prompt
        blocks = rows if single else tokens // tile.tokens + rows + 1
        kernel: Any = _ones if single else _many
        cut = {} if single else {"BLOCK_T": tile.tokens, "AHEAD": min(tile.ahead, 64 // facts.taps)}
        kernel[(triton.cdiv(facts.channels, tile.channels), blocks)](
            x, weight, packed["bias"] if facts.bias else weight, state, out, *step_args(batch), rows, tokens, *page_steps(batch),
            x.stride(0), *state.stride(), C=facts.channels, TAPS=facts.taps,
            BLOCK_C=min(tile.channels, triton.next_power_of_2(facts.channels)), BIAS=facts.bias, SILU=facts.activation == "silu",
            num_warps=tile.warps, enable_fp_fusion=False, **cut, **early(x.device, tokens),
        )  # fmt: skip
        return out
