"""`ssd_scan` in Triton: a few tokens one after the other on the state in registers; more in chunks, whose products meet the matrix units.

Within a chunk the outputs are a product of its tokens' weights with its inputs (arXiv:2405.21060). In float32, or with
states of more than 128 numbers a value, a program has a request's state of one head, or some of its rows, in registers from its first token
to its last; otherwise see `ssd_segments.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.scan import SsdFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.ssd_segments import WAYS, in_segments
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
    step_of,
    zero_rest,
)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _steps(x, dt, bias, a, b, c, d, state, out, query_start, fresh, read, write, rows, tokens, few, read_r, write_r,
           x_t, x_h, dt_t, b_t, b_g, c_t, c_g, s_page, s_h, s_p, HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
           N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SKIP: tl.constexpr,
           STEPS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Heads × blocks of their rows, × requests; those of more than `few` tokens are left alone. SKIP: there is d; STEPS: steps."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1)
    p = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    first, end = segment(query_start, row)
    if row == rows - 1:
        zero_rest(out, HEADS * P, head * P + p, p < P, end, tokens)
    if (end == first) | (end - first > few):
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    inside = (p < P)[:, None] & (n < N)[None, :]
    place = state + head * s_h + p.to(tl.int64)[:, None] * s_p + n[None, :]
    held = tl.load(place + page_in * s_page, mask=inside & kept, other=0.0)
    rate, shift = tl.load(a + head), tl.load(bias + head)
    group = head // (HEADS // GROUPS)
    for token in range(first, end):
        at = tl.cast(token, tl.int64)
        step = step_of(dt + at * dt_t + head, at >= 0, shift, LOW, HIGH, STEPS)
        value = tl.load(x + at * x_t + head * x_h + p, mask=p < P, other=0.0).to(tl.float32)
        added = tl.load(b + at * b_t + group * b_g + n, mask=n < N, other=0.0).to(tl.float32)
        asked = tl.load(c + at * c_t + group * c_g + n, mask=n < N, other=0.0).to(tl.float32)
        held = held * tl.exp(step * rate) + (value * step)[:, None] * added[None, :]
        result = tl.sum(held * asked[None, :], 1)
        if SKIP:
            result += value * tl.load(d + head)
        tl.store(out + (at * HEADS + head) * P + p, result.to(out.dtype.element_ty), mask=p < P)
    # The page may be the one that was read, by other threads too.
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=STEP)
def _chunks(x, dt, bias, a, b, c, d, state, out, query_start, fresh, read, write, few, read_r, write_r,
            x_t, x_h, dt_t, b_t, b_g, c_t, c_g, s_page, s_h, s_p, HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr,
            N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
            SKIP: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The same for requests of more than `few` tokens, CHUNK of them at a time."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1)
    p = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    first, end = segment(query_start, row)
    if end - first <= few:
        return
    kept, page_in, page_out = state_of(fresh, read, write, row, read_r, write_r)
    inside = (p < P)[:, None] & (n < N)[None, :]
    place = state + head * s_h + p.to(tl.int64)[:, None] * s_p + n[None, :]
    held = tl.load(place + page_in * s_page, mask=inside & kept, other=0.0)
    rate, shift = tl.load(a + head), tl.load(bias + head)
    group = head // (HEADS // GROUPS)
    each = tl.arange(0, CHUNK)
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        there = start + each < end
        at = (start + each).to(tl.int64)
        step = step_of(dt + at * dt_t + head, there, shift, LOW, HIGH, STEPS)
        values = tl.load(x + at[:, None] * x_t + head * x_h + p[None, :], mask=there[:, None] & (p < P)[None, :], other=0.0)
        mask = there[:, None] & (n < N)[None, :]
        added = tl.load(b + at[:, None] * b_t + group * b_g + n[None, :], mask=mask, other=0.0).to(values.dtype)
        asked = tl.load(c + at[:, None] * c_t + group * c_g + n[None, :], mask=mask, other=0.0).to(values.dtype)
        so_far = tl.cumsum(step * rate, 0)
        total = tl.sum(step * rate, 0)
        between = tl.exp(tl.where(each[:, None] >= each[None, :], so_far[:, None] - so_far[None, :], float("-inf")))
        weights = tl.dot(asked, tl.trans(added), input_precision="ieee") * between * step[None, :]
        result = tl.dot(asked, tl.trans(held.to(values.dtype)), input_precision="ieee") * tl.exp(so_far)[:, None]
        result = tl.dot(weights.to(values.dtype), values, result, input_precision="ieee")
        if SKIP:
            result += values.to(tl.float32) * tl.load(d + head)
        target = out + (at[:, None] * HEADS + head) * P + p[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=there[:, None] & (p < P)[None, :])
        scaled = values.to(tl.float32) * (tl.exp(total - so_far) * step)[:, None]
        held = tl.dot(tl.trans(scaled.to(values.dtype)), added, held * tl.exp(total), input_precision="ieee")
    tl.debug_barrier()
    tl.store(place + page_out * s_page, held, mask=inside)


class Inputs(NamedTuple):
    """Arguments of a launch: tensors, and their steps."""

    tensors: tuple[torch.Tensor, ...]
    steps: tuple[int, ...]


class SsdScan(PlainKernel):
    """`run(x, step, bias, a, b, c, d, state, batch)`, as in `ops.scan.SsdScanReference`."""

    facts: SsdFacts
    way = WAYS[0]
    few = FEW
    fused = True

    def run(
        self, x: torch.Tensor, step: torch.Tensor | None, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        d: torch.Tensor | None, state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        tokens, rows = x.shape[0], batch.read.shape[0]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if tokens == 0 or rows == 0:
            return out.zero_()
        x, b, c, dt = (by_rows(tensor) for tensor in (x, b, c, x if step is None else step))
        tensors = (x, dt, a if bias is None else bias, a, b, c, a if d is None else d, state, out, *step_args(batch))
        steps = (
            *x.stride()[:2], dt.stride(0), *b.stride()[:2], *c.stride()[:2], *state.stride()[:3],
        )  # fmt: skip
        low, high = self.facts.limits
        common = {"SKIP": d is not None, "STEPS": step is not None, "LOW": low, "HIGH": high, **early(x.device)}
        self._one_by_one(Inputs(tensors, steps), rows, tokens, batch, common)
        if batch.max_query > self.few and x.element_size() == 2 and self.facts.state <= 128:
            in_segments(self.facts, x, step if step is None else dt, bias, a, b, c, d, state, out, batch, self.few, self.way)
        elif batch.max_query > self.few:
            self._in_chunks(Inputs(tensors, steps), batch, x.element_size(), common)
        return out

    @property
    def sizes(self) -> dict[str, int]:
        facts = self.facts
        return {"HEADS": facts.heads, "GROUPS": facts.groups, "P": facts.head_dim, "N": facts.state}

    def _block_p(self, rows: int) -> int:
        """Rows of the state that a program takes."""
        return block_of(self.facts.head_dim, self.facts.state, rows * self.facts.heads)

    def _one_by_one(self, inputs: Inputs, rows: int, tokens: int, batch: StateBatch, common: dict[str, Any]) -> None:
        block_p, block_n = self._block_p(rows), triton.next_power_of_2(self.facts.state)
        _steps[(self.facts.heads * triton.cdiv(self.facts.head_dim, block_p), rows)](
            *inputs.tensors, rows, tokens, self.few, *page_steps(batch), *inputs.steps, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4,
            **self.sizes, enable_fp_fusion=self.fused, **common,
        )  # fmt: skip

    def _in_chunks(self, inputs: Inputs, batch: StateBatch, width: int, common: dict[str, Any]) -> None:
        block_n = max(16, triton.next_power_of_2(self.facts.state))
        block_p = max(16, min(triton.next_power_of_2(self.facts.head_dim), 64 if block_n <= 128 else 32))
        chunk = 64 if width == 2 else 32
        stage, beside = chunk * (2 * block_n + block_p) * width, (block_p * block_n + chunk * (chunk + block_p)) * width
        _chunks[(self.facts.heads * triton.cdiv(self.facts.head_dim, block_p), batch.many)](
            *inputs.tensors, self.few, *page_steps(batch), *inputs.steps, BLOCK_P=block_p, BLOCK_N=block_n, CHUNK=chunk,
            STAGES=fitting_stages(inputs.tensors[0].device, 3, stage, beside), num_warps=8, **self.sizes, **common,
        )  # fmt: skip


class SsdScanFixed(SsdScan):
    """The same, every token by itself and in one order: a request's numbers depend neither on company nor on where prompts are cut."""

    few = ALL
    fused = False

    def _block_p(self, rows: int) -> int:
        return super()._block_p(PROGRAMS)
