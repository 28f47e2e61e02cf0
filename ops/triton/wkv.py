"""`wkv` in Triton: blocks of channels × requests, tokens one after the other on the sums in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.state_rows import SIZES, STEP, by_rows, page_steps, segment, state_of, step_args, zero_rest
from pagoda.ops.wkv import NOTHING, WkvFacts

LEAST = tl.constexpr(NOTHING)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _walk(k, v, decay, first_weight, state, out, query_start, fresh, read, write, rows, tokens, read_r, write_r, k_t, v_t, s_page, s_sum,
          C: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    let_next_start(EARLY)
    wait_for_last(EARLY)
    channel, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = channel < C
    first, end = segment(query_start, row)
    if row == rows - 1:
        zero_rest(out, C, channel, inside, end, tokens)
    if first == end:
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    before = state + page_in * s_page + channel
    above = tl.load(before, mask=inside & kept, other=0.0)
    below = tl.load(before + s_sum, mask=inside & kept, other=0.0)
    top = tl.load(before + 2 * s_sum, mask=inside & kept, other=0.0)
    rate = tl.load(decay + channel, mask=inside, other=0.0)
    own = tl.load(first_weight + channel, mask=inside, other=0.0)
    for token in range(first, end):
        at = tl.cast(token, tl.int64)
        key = tl.load(k + at * k_t + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(v + at * v_t + channel, mask=inside, other=0.0).to(tl.float32)
        top = tl.where(below > 0, top, LEAST)
        largest = tl.maximum(top, own + key)
        old, new = tl.exp(top - largest), tl.exp(own + key - largest)
        result = (old * above + new * value) / (old * below + new)
        tl.store(out + at * C + channel, result.to(out.dtype.element_ty), mask=inside)
        largest = tl.maximum(top + rate, key)
        old, new = tl.exp(top + rate - largest), tl.exp(key - largest)
        above, below, top = old * above + new * value, old * below + new, largest
    # The page may be the one that was read, by other threads too.
    tl.debug_barrier()
    after = state + page_out * s_page + channel
    tl.store(after, above, mask=inside)
    tl.store(after + s_sum, below, mask=inside)
    tl.store(after + 2 * s_sum, top, mask=inside)


class Wkv(PlainKernel):
    """`run(k, v, decay, first, state, batch)`, as in `ops.wkv.WkvReference`: the same bits for a token in whatever step it comes."""

    facts: WkvFacts

    def run(
        self, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, state: torch.Tensor, batch: StateBatch
    ) -> torch.Tensor:
        tokens, rows = k.shape[0], batch.read.shape[0]
        out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        k, v, block = by_rows(k), by_rows(v), min(64, triton.next_power_of_2(self.facts.channels))
        _walk[(triton.cdiv(self.facts.channels, block), rows)](
            k, v, decay, first, state, out, *step_args(batch), rows, tokens, *page_steps(batch), k.stride(0), v.stride(0),
            *state.stride()[:2], C=self.facts.channels, BLOCK=block, num_warps=2, enable_fp_fusion=False, **early(k.device),
        )  # fmt: skip
        return out
