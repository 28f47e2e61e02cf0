"""`causal_conv1d` in Triton: blocks of tokens × channels, prompts and decodes in one kernel, states written where they are read.

Neighbouring threads have neighbouring channels: of a token, of a tap's weights (packed by taps), and of a state, where its channels lie
side by side as models keep them. A state with other steps is right, and slower.
"""

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
from pagoda.ops.triton.paged_kernels import find_request
from pagoda.ops.triton.state_rows import SIZES, STEP, by_rows, page_steps, segment, state_of, step_args, zero_rest
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _conv(x, weight, bias, state, out, query_start, fresh, read, write, rows, tokens, read_r, write_r, x_t, s_page, s_c, s_k,
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
    total *= tl.load(weight + (TAPS - 1) * C + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if not SINGLE:
        for back in tl.static_range(1, TAPS):
            value = tl.load(line - back * x_t, mask=here & (offset >= back)[:, None], other=0.0).to(tl.float32)
            total += value * tl.load(weight + (TAPS - 1 - back) * C + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if begin == first:
        # A token's own inputs are the later ones: the sum has the same order as if all came from one place.
        for back in tl.static_range(1, TAPS):
            older = here & (offset < back)[:, None] & kept
            value = tl.load(before[None, :] + ((TAPS - 1 - back + offset) * s_k)[:, None], mask=older, other=0.0).to(tl.float32)
            total += value * tl.load(weight + (TAPS - 1 - back) * C + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + place, total.to(out.dtype.element_ty), mask=here)
    if begin == first:
        k = tl.arange(0, BLOCK_K)
        at = end - (TAPS - 1) + k
        wanted = (k < TAPS - 1)[:, None] & inside[None, :]
        latest = tl.load(x + at.to(tl.int64)[:, None] * x_t + channel[None, :], mask=wanted & (at >= first)[:, None], other=0.0)
        left = tl.load(before[None, :] + ((at - first + TAPS - 1) * s_k)[:, None], mask=wanted & (at < first)[:, None] & kept, other=0.0)
        # The page may be the one that was read, by other threads too.
        tl.debug_barrier()
        after = state + page_out * s_page + channel.to(tl.int64)[None, :] * s_c + (k * s_k)[:, None]
        tl.store(after, tl.where((at >= first)[:, None], latest.to(state.dtype.element_ty), left), mask=wanted)


class Tile(NamedTuple):
    """Tokens and channels of a program, and its warps."""

    tokens: int
    channels: int
    warps: int


class CausalConv(PlainKernel):
    """`run(packed, x, state, batch)`, as in `ops.conv.CausalConvReference`: the same bits for a token in whatever step it comes.

    Attributes:
        one: tiles of a few decodes. many: of more. prompt: of steps with prompts.
    """

    facts: ConvFacts
    one = Tile(1, 256, 1)
    many = Tile(1, 1024, 4)
    prompt = Tile(32, 256, 8)

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
        _conv[(blocks, triton.cdiv(facts.channels, tile.channels))](
            x, weight, packed["bias"] if facts.bias else weight, state, out, *step_args(batch), rows, tokens, *page_steps(batch),
            x.stride(0), *state.stride(), C=facts.channels, TAPS=facts.taps, BLOCK_T=tile.tokens,
            BLOCK_C=min(tile.channels, triton.next_power_of_2(facts.channels)), BLOCK_K=triton.next_power_of_2(facts.taps - 1),
            SINGLE=single, BIAS=facts.bias, SILU=facts.activation == "silu", num_warps=tile.warps, enable_fp_fusion=False,
            **early(x.device),
        )  # fmt: skip
        return out
