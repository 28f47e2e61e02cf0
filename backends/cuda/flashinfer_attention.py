"""Paged attention whose prompts go through FlashInfer's Hopper kernel (fa3); decodes are Triton's, which that kernel is not made for.

Imported when the kernel is resolved, so FlashInfer is an optional package.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from numpy.typing import NDArray
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.paged_attention import PagedAttention, Part, results

IN_TURN = 3
"""Plans whose copies to the device may be under way at once."""
WORKSPACE = 1 << 20
"""Bytes that fa3 is given for partial results; it makes none."""


class Prompts(NamedTuple):
    """The prompts of a step: a planned wrapper of FlashInfer, how many query tokens it is given, and when its plan is on the device."""

    wrapper: Any
    tokens: int
    copied: torch.cuda.Event | None = None


class StepParts(NamedTuple):
    """A step's prompts, and its decodes behind them as Triton's parts; `covered` where both write every token."""

    prompts: Prompts | None
    rest: tuple[Part, ...]
    covered: bool


class Metadata(NamedTuple):
    """What fa3 is planned from, on the host: query starts, keys of each request."""

    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]


class FlashInferAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self._rest = PagedAttention(facts)
        self._wrappers: list[Any] = []
        self._turn = 0

    def plan(self, batch: PagedBatch, buffers: StepParts | None = None) -> StepParts:
        """Prompts are planned on the host from exact lengths; a batch that lacks them goes to Triton as a whole."""
        prompts = batch.lengths.prompts if batch.lengths is not None else 0
        if batch.replayed and batch.max_query > 1:
            return self._replayed(batch, prompts, buffers)
        if batch.lengths is None or not prompts:
            plan = self._rest.plan(batch)
            return StepParts(None, plan.parts, plan.covered)
        starts = batch.lengths.query_start
        tokens = int(starts[prompts])
        rest = self._rest.plan(batch.rows(prompts), after=tokens) if prompts < len(batch.lengths.seq_lens) else None
        wrapper = self._next(batch.block_table.device)
        self._plan(wrapper, batch.block_table[:prompts], Metadata(starts[: prompts + 1], batch.lengths.seq_lens[:prompts]))
        return StepParts(Prompts(wrapper, tokens), rest.parts if rest else (), int(starts[-1]) == batch.slots.shape[0])

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, plan: StepParts | None = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan or self.plan(replace(batch, lengths=None))
        out = results(q, batch, self.facts, plan.covered)
        if plan.prompts is not None:
            wrapper, tokens, _ = plan.prompts
            # Head-major inside a page, as it lies.
            wrapper.run(q[:tokens], (k_pages.transpose(1, 2), v_pages.transpose(1, 2)), out=out[:tokens])
        for part in plan.rest:
            self._rest.run_part(part, q[part.tokens], k_pages, v_pages, out[part.tokens], sinks, slopes)
        return out

    def _replayed(self, batch: PagedBatch, prompts: int, old: StepParts | None) -> StepParts:
        """A plan in buffers that stay. The first one is of a prompt that fills the step: what is captured must bear the largest."""
        tokens, rows = batch.slots.shape[0], batch.seq_lens.shape[0]
        if old is None:
            wrapper = self._stable(batch)
            whole = np.full(rows + 1, tokens, np.int32)
            whole[0] = 0
            self._plan(wrapper, batch.block_table, Metadata(whole, whole[1:] * (np.arange(rows) == 0).astype(np.int32)))
            single = self._rest.part(batch, slice(0, tokens), single=True)
            return StepParts(Prompts(wrapper, tokens, torch.cuda.Event()), (single,), False)
        assert batch.lengths is not None and old.prompts is not None and old.prompts.copied is not None
        # The staging of the last plan is free when it has crossed, which it has when its step runs.
        old.prompts.copied.synchronize()
        starts = np.full(rows + 1, batch.lengths.query_start[prompts], np.int32)
        starts[: prompts + 1] = batch.lengths.query_start[: prompts + 1]
        lengths = np.zeros(rows, np.int32)
        lengths[:prompts] = batch.lengths.seq_lens[:prompts]
        self._plan(old.prompts.wrapper, batch.block_table, Metadata(starts, lengths))
        old.prompts.copied.record()
        return old

    def _plan(self, wrapper: Any, table: torch.Tensor, step: Metadata) -> None:
        facts, dtype, rows = self.facts, getattr(torch, self.facts.dtype), len(step.seq_lens)
        # A request's pages are found from where they begin and its length: rows of the table will do as they are.
        wrapper.plan(
            torch.from_numpy(step.query_start.copy()),
            torch.from_numpy(np.arange(rows + 1, dtype=np.int32) * table.shape[1]),
            table.reshape(-1),
            torch.ones(rows, dtype=torch.int32),
            facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.page_size,
            causal=True, sm_scale=facts.scale, window_left=-1 if facts.window is None else facts.window - 1,
            logits_soft_cap=facts.softcap, q_data_type=dtype, kv_data_type=dtype,
            seq_lens=torch.from_numpy(step.seq_lens.copy()),
        )  # fmt: skip

    def _next(self, device: torch.device) -> Any:
        if len(self._wrappers) < IN_TURN:
            workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
            self._wrappers.append(BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3"))
            return self._wrappers[-1]
        self._turn = (self._turn + 1) % IN_TURN
        return self._wrappers[self._turn]

    def _stable(self, batch: PagedBatch) -> Any:
        rows, device = batch.seq_lens.shape[0], batch.block_table.device
        starts, indptr, last = (torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows + 1, rows))
        return BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "HND", use_cuda_graph=True, qo_indptr_buf=starts,
            paged_kv_indptr_buf=indptr, paged_kv_indices_buf=batch.block_table.reshape(-1), paged_kv_last_page_len_buf=last, backend="fa3",
        )  # fmt: skip
