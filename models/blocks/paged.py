"""What every mixer over paged K and V shares: finding the kernels for a page size, writing a step's K and V, attending."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pagoda.hal.errors import KernelError
from pagoda.hal.kernel import KernelRun
from pagoda.hal.kv import LayerCache, LayerPages
from pagoda.hal.table import KernelTable
from pagoda.models.builder import Builder
from pagoda.ops.attention import AttentionFacts, PagedAttentionReference, PagedBatch, Spans, span_batch, written
from pagoda.ops.segment_attention import Segments
from pagoda.ops.state import StateBatch


@dataclass(slots=True)
class Step:
    """What the layers of one forward share: batches and plans per cache group, cos and sin per rope, positions and adapter slots `[T]`.

    spans: tokens that see each other in both directions.
    embedded: what the layers began with, where one asks for it. chosen: keys that the last layer with an `Index` chose.
    routed: where each layer with experts leaves the ids that it chose, `[T, k]`; None: nobody asks.
    """

    groups: tuple[PagedBatch, ...]
    plans: tuple[Any, ...]
    ropes: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    positions: torch.Tensor
    adapters: torch.Tensor | None = None
    segments: Segments | None = None
    routed: list[torch.Tensor] | None = None
    embedded: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    spans: Spans | None = None
    _states: dict[tuple[int, int], StateBatch] = field(default_factory=dict)

    def states(self, group: int, page: int) -> StateBatch:
        """What layers whose state lies in page `page` of a request's state read and write."""
        found = self._states.get((group, page))
        if found is None:
            found = self._states[group, page] = _state_batch(self.groups[group], page)
        return found


def _state_batch(batch: PagedBatch, page: int) -> StateBatch:
    lengths = batch.query_start[1:] - batch.query_start[:-1]
    table = batch.block_table.long()
    rows, columns = table.shape
    # A replayed step serves others of its sizes, whose prompts may be more.
    many = rows if batch.lengths is None or batch.replayed else batch.lengths.prompts
    return StateBatch(
        batch.query_start,
        batch.seq_lens <= lengths,
        table[:, page],
        table[:, columns // 2 + page],
        many if batch.max_query > 1 else 0,
        batch.max_query,
    )


class PagedMixer:
    """The attention primitive of one layer on one rank, and its pages.

    Attributes:
        cache: what it stores per token.
        facts: of the attention primitive, with the page size of the last `bind`.
        rope_index: which of the step's ropes turns its q and k.
    """

    rope_index: int
    _pages: LayerPages
    _stored: LayerPages

    def __init__(self, build: Builder, facts: AttentionFacts, cache: LayerCache) -> None:
        self.facts, self.cache = facts, cache
        usable = self._usable(build.table)
        build.uses += [("write_kv", self._written(usable)), ("paged_attention", usable)]

    def page_sizes(self, table: KernelTable) -> tuple[int, ...]:
        """Tokens per page that a kernel fits, in the device's order."""
        return tuple(size for size in table.info.limits.page_sizes if self._fits(table, replace(self.facts, page_size=size)))

    def bind(self, table: KernelTable, pages: LayerPages | None, group: int, page_size: int, planner: int) -> None:
        """Resolve the kernels for this page size. `planner`: which of the group's plans is this layer's."""
        self.facts = replace(self.facts, page_size=page_size)
        self._table, self.kernel = table, table.resolve("paged_attention", self.facts)
        self._attend, self._write = self.kernel.run, table.resolve("write_kv", self._written(self.facts)).run
        self._group, self._planner = group, planner
        if pages is not None:
            self._pages = self._stored = pages
        if pages is not None and self.facts.latent:
            self._pages = LayerPages(pages.k, pages.k[..., : self.facts.v_dim])

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Store k `[T, Hk, D]`, v `[T, Hk, Dv]` (of latents no numbers), then q `[T, H, D]` → `[T, H, Dv]`."""
        self._write(k, v, *self._stored, step.groups[self._group].slots)
        return self.attend_stored(q, step, sinks, slopes, bias)

    def attend_stored(
        self, q: torch.Tensor, step: Step,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The same where this step's k and v are in their pages."""
        batch, plans = step.groups[self._group], step.plans[self._group] if step.plans else None
        plan = plans[self._planner] if plans else None
        out = self._attend(q, *self._pages, batch, plan, sinks, slopes, *(() if bias is None else (bias,)))
        if step.spans is None:
            return out
        own = span_batch(batch, step.spans, q.shape[0])
        kernel = self._both_ways()
        seen = kernel.run(q[step.spans.rows], *self._pages, own, kernel.plan(own), sinks, slopes)
        return out.index_copy(0, step.spans.rows, seen)

    def _both_ways(self) -> KernelRun:
        """For tokens that see each other in both directions: few models have any, so it is resolved when the first ones come."""
        facts = replace(self.facts, causal=False)
        fits = _chooses(self._table, "paged_attention", facts)
        return self._table.resolve("paged_attention", facts) if fits else PagedAttentionReference(facts)

    def _usable(self, table: KernelTable | None) -> AttentionFacts:
        if table is None:
            return self.facts
        fitting = [replace(self.facts, page_size=size) for size in table.info.limits.page_sizes]
        return next((facts for facts in fitting if self._fits(table, facts)), fitting[0])

    def _fits(self, table: KernelTable, facts: AttentionFacts) -> bool:
        return _chooses(table, "paged_attention", facts) and _chooses(table, "write_kv", self._written(facts))

    def _written(self, facts: AttentionFacts) -> AttentionFacts:
        """Of the primitive that fills its pages."""
        return written(facts)


def _chooses(table: KernelTable, op: str, facts: AttentionFacts) -> bool:
    try:
        table.choose(op, facts)
    except KernelError:
        return False
    return True
