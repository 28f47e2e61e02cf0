"""Paged attention in Triton: prompts and decodes of a step in launches of their own, decodes split over their keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.paged_kernels import attend, merge
from pagoda.ops.triton.tiles import Tile, tile_of
from triton.tools.tensor_descriptor import TensorDescriptor

PROGRAMS = 512
"""Programs of a decode step that keep a large device busy; fewer rows are split over their keys."""
KEYS = 128
"""Fewest keys of a split."""


class Part(NamedTuple):
    """Requests of a step that one launch takes.

    Attributes:
        batch: the requests; its query tokens are `tokens` of the step's.
        tile: how it is cut. splits: of the keys, a power of two.
    """

    batch: PagedBatch
    tokens: slice
    tile: Tile
    splits: int


class AttentionPlan(NamedTuple):
    """The launches of a step; `covered` where they write every token, padding included."""

    parts: tuple[Part, ...]
    covered: bool


class PagedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self.group = facts.num_heads // facts.num_kv_heads
        self.block_d = max(triton.next_power_of_2(facts.head_dim), 16)
        self.block_dv = max(triton.next_power_of_2(facts.v_dim), 16)
        self.precision = "ieee" if facts.dtype == "float32" else "tf32"
        self._descriptors: dict[tuple[object, ...], TensorDescriptor] = {}

    def plan(self, batch: PagedBatch, buffers: Any | None = None, after: int = 0) -> AttentionPlan:
        """Decodes behind prompts get a launch of their own where the host knows the lengths. `after`: tokens that are no concern here."""
        tokens = batch.slots.shape[0]
        if batch.max_query <= 1:
            covered = tokens == batch.seq_lens.shape[0]
            return AttentionPlan((self.part(batch, slice(after, after + tokens)),), covered)
        if batch.lengths is None:
            return AttentionPlan((self.part(batch, slice(0, tokens)),), False)
        prompts = batch.lengths.prompts
        first = int(batch.lengths.query_start[prompts])
        parts = [self.part(batch.rows(0, prompts), slice(0, first))] if prompts else []
        if prompts < len(batch.lengths.seq_lens):
            parts.append(self.part(batch.rows(prompts), slice(first, int(batch.lengths.query_start[-1]))))
        return AttentionPlan(tuple(parts), int(batch.lengths.query_start[-1]) == tokens)

    def part(self, batch: PagedBatch, tokens: slice, tile: Tile | None = None, splits: int = 0) -> Part:
        """One launch, with the tile and splits that the table has unless they are given."""
        facts, single = self.facts, batch.max_query <= 1
        rows = self.group * min(max(batch.max_query, 1), 128)
        chosen = tile or tile_of(rows, max(self.block_d, self.block_dv), 4 if facts.dtype == "float32" else 2, facts.page_size)
        chosen = chosen._replace(rows=max(chosen.rows, triton.next_power_of_2(self.group)))
        return Part(batch, tokens, chosen, splits or (self._splits(batch) if single else 1))

    def _splits(self, batch: PagedBatch) -> int:
        """Enough programs for a large device: decode rows × KV heads × splits."""
        programs = max(batch.seq_lens.shape[0] * self.facts.num_kv_heads, 1)
        visible = min(batch.max_seq, self.facts.window or self.facts.chunk or batch.max_seq)
        wanted = min(-(-PROGRAMS // programs), -(-visible // KEYS), 64)
        return int(triton.next_power_of_2(max(wanted, 1)))

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: AttentionPlan | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = plan or self.plan(batch)
        # Padding tokens belong to no request and no program writes them: zero is their finite number.
        make = torch.empty if plan.covered else torch.zeros
        out = make(q.shape[0], self.facts.num_heads, self.facts.v_dim, dtype=q.dtype, device=q.device)
        for part in plan.parts:
            self.run_part(part, q[part.tokens], k_pages, v_pages, out[part.tokens], sinks, slopes)
        return out

    def run_part(
        self, part: Part, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor,
        sinks: torch.Tensor | None, slopes: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """One part; q and out hold its tokens alone."""
        facts, splits, tokens = self.facts, part.splits, q.shape[0]
        if tokens == 0 or part.batch.seq_lens.shape[0] == 0:
            return
        partial = lse = out
        if splits > 1:
            partial = torch.empty(tokens, facts.num_heads, splits, facts.v_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(tokens, facts.num_heads, splits, 2, dtype=torch.float32, device=q.device)
        self._attend(part, q, k_pages, v_pages, out, partial, lse, sinks, slopes)
        if splits > 1:
            merge[(min(tokens, part.batch.seq_lens.shape[0]), facts.num_heads)](
                partial, lse, out, out if sinks is None else sinks, out.stride(0), out.stride(1),
                HEADS=facts.num_heads, DV=facts.v_dim, BLOCK_DV=self.block_dv, SPLITS=splits, SINKS=sinks is not None,
            )  # fmt: skip

    def _attend(self, part: Part, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor,
                partial: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, slopes: torch.Tensor | None) -> None:  # fmt: skip
        facts, batch, tile, requests = self.facts, part.batch, part.tile, part.batch.seq_lens.shape[0]
        single = batch.max_query <= 1
        block_q = 1 if single else max(tile.rows // self.group, 1)
        blocks = requests if single else q.shape[0] // block_q + requests
        described = tile.descriptor and self._describable(k_pages, v_pages, tile.keys)
        keys = self._descriptor(k_pages, tile.keys, self.block_d) if described else k_pages
        values = self._descriptor(v_pages, tile.keys, self.block_dv) if described else v_pages
        attend[(blocks, facts.num_kv_heads, part.splits)](
            q, keys, values, out, partial, lse, batch.query_start, batch.seq_lens, batch.block_table,
            out if sinks is None else sinks, out if slopes is None else slopes,
            facts.scale, facts.softcap or 0.0, requests, blocks,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            batch.block_table.stride(0),
            HEADS=facts.num_heads, GROUP=self.group, BLOCK_Q=block_q, BLOCK_M=tile.rows, SINGLE=single,
            TILE=tile.keys, PAGE=facts.page_size, D=facts.head_dim, DV=facts.v_dim, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv,
            WINDOW=facts.window or 0, CHUNK=facts.chunk or 0, CAUSAL=facts.causal, SOFTCAP=facts.softcap is not None,
            SINKS=sinks is not None, ALIBI=slopes is not None, SPLITS=part.splits, DESCRIPTOR=described, PRECISION=self.precision,
            STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _describable(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: int) -> bool:
        """A tile is a whole part of a page, and strides and addresses are multiples of 16 bytes."""
        if self.facts.page_size % keys or (self.block_d, self.block_dv) != (self.facts.head_dim, self.facts.v_dim):
            return False
        return all(
            pages.data_ptr() % 16 == 0 and pages.stride(3) == 1 and all(s * pages.element_size() % 16 == 0 for s in pages.stride()[:3])
            for pages in (k_pages, v_pages)
        )

    def _descriptor(self, pages: torch.Tensor, keys: int, dim: int) -> TensorDescriptor:
        key = (pages.data_ptr(), pages.shape, pages.stride(), keys)
        if key not in self._descriptors:
            if len(self._descriptors) > 1024:
                self._descriptors.clear()
            view = pages.permute(0, 2, 1, 3)
            self._descriptors[key] = TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, keys, dim])
        return self._descriptors[key]
