"""Paged attention whose prompts go through FlashInfer's Hopper kernel (fa3); decodes are Triton's, which that kernel is not made for.

Prompts for which it pays have their contexts laid one after another first (`context_rows`).

Imported when the kernel is resolved, so FlashInfer is an optional package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from numpy.typing import NDArray
from pagoda.backends.cuda.context_rows import Metadata, contexts, padded, pays
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.context_rows import lay_out
from pagoda.ops.triton.paged_attention import PagedAttention, Part, results

IN_TURN = 3
"""Plans whose copies to the device may be under way at once."""
WORKSPACE = 1 << 20
"""Bytes that fa3 is given for partial results; it makes none."""
QUERIES, MARGIN = 64, 1 << 16
"""Query tokens of a tile, at least; bytes of a plan that do not depend on tiles, at most."""
CONTEXTS = 2
"""Rows of a captured step's contexts for each of its tokens; what needs more reads pages."""


@dataclass
class Prompts:
    """The prompts of a step.

    Attributes:
        wrapper: FlashInfer's, planned.
        tokens: query tokens that it is planned for, 0 where it has nothing to do. Of a replayed step each plan changes it.
        parts: `[M, 2]` int32 on the device, where contexts are laid as rows. staging: on the host, of a replayed step.
    """

    wrapper: Any
    tokens: int
    parts: torch.Tensor | None = None
    staging: torch.Tensor | None = None


class StepParts(NamedTuple):
    """A step's prompts, and its decodes behind them as Triton's parts; `covered` where both write every token. copied: of a replayed step,
    when its last plan is on the device."""

    prompts: tuple[Prompts, ...]
    rest: tuple[Part, ...]
    covered: bool
    copied: torch.cuda.Event | None = None


class FlashInferAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes)`, as in `ops.attention.PagedAttentionReference`.

    The first plan of a replayed step is of the largest that it may serve, to be captured; with that as `buffers` it is this step's.
    """

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self._rest = PagedAttention(facts)
        self._wrappers: dict[bool, list[Any]] = {False: [], True: []}
        self._turn = 0
        self._space: torch.Tensor | None = None

    def as_rows(self, step: Metadata) -> bool:
        """Whether contexts are laid as rows."""
        return pays(self.facts, step)

    def plan(self, batch: PagedBatch, buffers: StepParts | None = None) -> StepParts:
        """Prompts are planned on the host from exact lengths; a batch that lacks them goes to Triton as a whole."""
        prompts = batch.lengths.prompts if batch.lengths is not None else 0
        if batch.replayed and batch.max_query > 1:
            return self._replayed(batch) if buffers is None else self._replanned(batch, prompts, buffers)
        if batch.lengths is None or not prompts:
            plan = self._rest.plan(batch)
            return StepParts((), plan.parts, plan.covered)
        starts, table = batch.lengths.query_start, batch.block_table
        step = Metadata(starts[: prompts + 1], batch.lengths.seq_lens[:prompts])
        tokens = int(starts[prompts])
        rest = self._rest.plan(batch.rows(prompts), after=tokens) if prompts < len(batch.lengths.seq_lens) else None
        rows = self.as_rows(step)
        planned = Prompts(self._next(table.device, rows), tokens)
        if rows:
            parts = torch.from_numpy(self._plan_rows(planned.wrapper, step, table.stride(0)))
            planned.parts = parts.to(table.device, non_blocking=True)
        else:
            self._plan_pages(planned.wrapper, step, table)
        return StepParts((planned,), rest.parts if rest else (), int(starts[-1]) == batch.slots.shape[0])

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, plan: StepParts | None = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        plan = plan or self.plan(replace(batch, lengths=None))
        out = results(q, batch, self.facts, plan.covered)
        for prompts in plan.prompts:
            mine = slice(0, prompts.tokens)
            if prompts.tokens and prompts.parts is not None:
                prompts.wrapper.run(q[mine], *lay_out(k_pages, v_pages, batch.block_table, prompts.parts, self.facts), out=out[mine])
            elif prompts.tokens:
                # Head-major inside a page, as it lies.
                prompts.wrapper.run(q[mine], (k_pages.transpose(1, 2), v_pages.transpose(1, 2)), out=out[mine])
        for part in plan.rest:
            self._rest.run_part(part, q[part.tokens], k_pages, v_pages, out[part.tokens], sinks, slopes)
        return out

    def _replayed(self, batch: PagedBatch) -> StepParts:
        """A plan in buffers that stay, of a prompt that fills the step: what is captured must bear the largest. Where rows may pay, both
        ways are captured, and for each step one of them has nothing to do."""
        tokens, requests, table = batch.slots.shape[0], batch.seq_lens.shape[0], batch.block_table
        whole = Metadata(np.full(requests + 1, tokens, np.int32), np.zeros(requests, np.int32))
        whole.query_start[0], whole.seq_lens[:1] = 0, tokens
        prompts = [Prompts(self._stable_pages(batch), tokens)]
        if self.as_rows(whole):
            room = CONTEXTS * int(padded(whole.seq_lens, self.facts.page_size).sum()) // self.facts.page_size
            staging = torch.empty(room, 2, dtype=torch.int32, pin_memory=table.device.type == "cuda")
            prompts.append(Prompts(self._stable_rows(batch), tokens, torch.empty_like(staging, device=table.device), staging))
        for prompt in prompts:
            self._fill(prompt, whole, table)
        single = self._rest.part(batch, slice(0, tokens), single=True)
        return StepParts(tuple(prompts), (single,), False, torch.cuda.Event())

    def _replanned(self, batch: PagedBatch, prompts: int, plan: StepParts) -> StepParts:
        """The same plan, from now on for this step."""
        assert batch.lengths is not None and plan.copied is not None
        # The staging of the last plan is free when it has crossed, which it has when its step runs.
        plan.copied.synchronize()
        requests, tokens = batch.seq_lens.shape[0], int(batch.lengths.query_start[prompts])
        step, nothing = (Metadata(np.full(requests + 1, n, np.int32), np.zeros(requests, np.int32)) for n in (tokens, 0))
        step.query_start[: prompts + 1] = batch.lengths.query_start[: prompts + 1]
        step.seq_lens[:prompts] = batch.lengths.seq_lens[:prompts]
        chosen = plan.prompts[-1]
        if chosen.parts is not None and not (self._has_room(chosen.parts, step) and self.as_rows(step)):
            chosen = plan.prompts[0]
        for prompt in plan.prompts:
            if prompt is chosen or prompt.tokens:
                self._fill(prompt, step if prompt is chosen else nothing, batch.block_table)
        plan.copied.record()
        return plan

    def _has_room(self, parts: torch.Tensor, step: Metadata) -> bool:
        return int(padded(step.seq_lens, self.facts.page_size).sum()) <= parts.shape[0] * self.facts.page_size

    def _fill(self, prompt: Prompts, step: Metadata, table: torch.Tensor) -> None:
        """Plan one of a replayed step's wrappers."""
        prompt.tokens = int(step.query_start[-1])
        if prompt.parts is None or prompt.staging is None:
            self._plan_pages(prompt.wrapper, step, table)
            return
        prompt.staging.numpy()[:] = self._plan_rows(prompt.wrapper, step, table.stride(0), len(prompt.parts))
        prompt.parts.copy_(prompt.staging, non_blocking=True)

    def _plan_pages(self, wrapper: Any, step: Metadata, table: torch.Tensor) -> None:
        facts, rows = self.facts, len(step.seq_lens)
        # A request's pages are found from where they begin and its length: rows of the table will do as they are.
        wrapper.plan(
            torch.from_numpy(step.query_start.copy()),
            torch.from_numpy(np.arange(rows + 1, dtype=np.int32) * table.shape[1]),
            table.reshape(-1),
            torch.ones(rows, dtype=torch.int32),
            facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.page_size,
            seq_lens=torch.from_numpy(step.seq_lens.copy()), **self._settings(),
        )  # fmt: skip

    def _plan_rows(self, wrapper: Any, step: Metadata, width: int, room: int = 0) -> NDArray[np.int32]:
        """The parts that `lay_out` takes. To the wrapper the zeros behind each context are requests without queries."""
        facts, laid = self.facts, contexts(step.seq_lens, self.facts.page_size, width, room)
        starts = np.concatenate([step.query_start[:1], np.repeat(step.query_start[1:], 2)])
        wrapper.plan(
            torch.from_numpy(starts), torch.from_numpy(laid.bounds), facts.num_heads, facts.num_kv_heads, facts.head_dim, **self._settings()
        )
        return laid.parts

    def _settings(self) -> dict[str, Any]:
        facts, dtype = self.facts, getattr(torch, self.facts.dtype)
        window = -1 if facts.window is None else facts.window - 1
        return {
            "causal": True, "sm_scale": facts.scale, "window_left": window, "logits_soft_cap": facts.softcap,
            "q_data_type": dtype, "kv_data_type": dtype,
        }  # fmt: skip

    def _next(self, device: torch.device, rows: bool) -> Any:
        made = self._wrappers[rows]
        if len(made) < IN_TURN:
            made.append(
                BatchPrefillWithRaggedKVCacheWrapper(self._workspace(device), "NHD", backend="fa3")
                if rows
                else BatchPrefillWithPagedKVCacheWrapper(self._workspace(device), "HND", backend="fa3")
            )
            return made[-1]
        self._turn = (self._turn + 1) % IN_TURN
        return made[self._turn]

    def _stable_pages(self, batch: PagedBatch) -> Any:
        requests, table = batch.seq_lens.shape[0], batch.block_table
        starts, indptr, last = (_integers(size, table.device) for size in (requests + 1, requests + 1, requests))
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self._workspace(table.device), "HND", use_cuda_graph=True, qo_indptr_buf=starts, paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=table.reshape(-1), paged_kv_last_page_len_buf=last, backend="fa3",
        )  # fmt: skip
        return self._shrunk(wrapper, batch, requests)

    def _stable_rows(self, batch: PagedBatch) -> Any:
        requests, device = 2 * batch.seq_lens.shape[0], batch.block_table.device
        starts, bounds = (_integers(requests + 1, device) for _ in range(2))
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace(device), "NHD", use_cuda_graph=True, qo_indptr_buf=starts, kv_indptr_buf=bounds, backend="fa3"
        )
        return self._shrunk(wrapper, batch, requests)

    def _shrunk(self, wrapper: Any, batch: PagedBatch, requests: int) -> Any:
        """With room for the plans of its step, and not 8 MiB here and on the host: there is a wrapper for each captured size. fa3 plans
        seven numbers for each head of each tile of queries, of which requests begin one each."""
        tiles = -(-batch.slots.shape[0] // QUERIES) + requests
        room = torch.empty(MARGIN + 4 * 7 * self.facts.num_heads * tiles, dtype=torch.uint8, device=batch.block_table.device)
        wrapper.reset_workspace_buffer(self._workspace(room.device), room)
        return wrapper

    def _workspace(self, device: torch.device) -> torch.Tensor:
        if self._space is None:
            self._space = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        return self._space


def _integers(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


class FlashInferPages(FlashInferAttention):
    """The same on pages alone, to compare."""

    def as_rows(self, step: Metadata) -> bool:
        return False


class FlashInferRows(FlashInferAttention):
    """The same with contexts as rows however small they are, where there is room for them, to compare."""

    def as_rows(self, step: Metadata) -> bool:
        return True
