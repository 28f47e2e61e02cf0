"""Paged attention whose prompts go through FlashInfer's Hopper kernel (fa3); decodes are Triton's, which that kernel is not made for.

Imported when the kernel is resolved, so FlashInfer is an optional package.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.paged_attention import PagedAttention, Part

IN_TURN = 3
"""Plans whose copies to the device may be under way at once."""
WORKSPACE = 1 << 20
"""Bytes that fa3 is given for partial results; it makes none."""


class Prompts(NamedTuple):
    """The prompts of a step: a planned wrapper of FlashInfer, and their query tokens."""

    wrapper: Any
    tokens: int


class StepParts(NamedTuple):
    """A step's prompts, and its decodes behind them as Triton's parts; `covered` where both write every token."""

    prompts: Prompts | None
    rest: tuple[Part, ...]
    covered: bool


class FlashInferAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self._rest = PagedAttention(facts)
        self._wrappers: list[Any] = []
        self._turn = 0

    def plan(self, batch: PagedBatch, buffers: Any | None = None) -> StepParts:
        """Prompts are planned on the host from exact lengths; a batch that lacks them goes to Triton as a whole."""
        prompts = batch.lengths.prompts if batch.lengths is not None else 0
        if batch.lengths is None or not prompts:
            plan = self._rest.plan(batch)
            return StepParts(None, plan.parts, plan.covered)
        starts = batch.lengths.query_start
        tokens = int(starts[prompts])
        rest = self._rest.plan(batch.rows(prompts), after=tokens) if prompts < len(batch.lengths.seq_lens) else None
        wrapper = self._planned(batch, prompts)
        return StepParts(Prompts(wrapper, tokens), rest.parts if rest else (), int(starts[-1]) == batch.slots.shape[0])

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, plan: StepParts | None = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan or self.plan(replace(batch, lengths=None))
        shape = (q.shape[0], self.facts.num_heads, self.facts.v_dim)
        out = q.new_empty(shape) if plan.covered else q.new_zeros(shape)
        if plan.prompts is not None:
            wrapper, tokens = plan.prompts
            # Head-major inside a page, as it lies.
            wrapper.run(q[:tokens], (k_pages.transpose(1, 2), v_pages.transpose(1, 2)), out=out[:tokens])
        for part in plan.rest:
            self._rest.run_part(part, q[part.tokens], k_pages, v_pages, out[part.tokens], sinks, slopes)
        return out

    def _planned(self, batch: PagedBatch, prompts: int) -> Any:
        assert batch.lengths is not None
        facts, dtype = self.facts, getattr(torch, self.facts.dtype)
        wrapper = self._next(batch.block_table.device)
        width = batch.block_table.shape[1]
        # A request's pages are found from where they begin and its length: rows of the table will do as they are.
        wrapper.plan(
            torch.from_numpy(batch.lengths.query_start[: prompts + 1].copy()),
            torch.from_numpy(np.arange(prompts + 1, dtype=np.int32) * width),
            batch.block_table[:prompts].reshape(-1),
            torch.ones(prompts, dtype=torch.int32),
            facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.page_size,
            causal=True, sm_scale=facts.scale, window_left=-1 if facts.window is None else facts.window - 1,
            logits_soft_cap=facts.softcap, q_data_type=dtype, kv_data_type=dtype,
            seq_lens=torch.from_numpy(batch.lengths.seq_lens[:prompts].copy()),
        )  # fmt: skip
        return wrapper

    def _next(self, device: torch.device) -> Any:
        if len(self._wrappers) < IN_TURN:
            workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
            self._wrappers.append(BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3"))
            return self._wrappers[-1]
        self._turn = (self._turn + 1) % IN_TURN
        return self._wrappers[self._turn]
