"""Paged attention in Triton: prompts and decodes of a step in launches of their own, decodes split over their keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.triton.float8 import as_stored
from pagoda.ops.triton.launch import (
    describes,
    early,
    fitting_stages,
    most_stages,
    narrow_units,
    shared_memory,
    waves_of_32,
)
from pagoda.ops.triton.paged_kernels import attend, attend_shared, merge, zero_padding
from pagoda.ops.triton.tiles import SHARED, Tile, by_warps, float32_tile, in_registers, tile_of
from triton.tools.tensor_descriptor import TensorDescriptor

PROGRAMS = 512
"""Programs of a decode step that keep a large device busy; fewer rows are split over their keys."""
KEYS = 64
"""Fewest keys of a split."""
SLOTS = 128
"""Partial results of a row, at most."""
JOINED, TOGETHER = 32, 1024
"""Partial results of a row, and numbers of a group's result, up to which the last program of a group merges them: beyond, programs of a
kernel of their own, one a head, read them sooner."""
READ = 4096
"""Numbers that such a program reads at a time."""
BESIDE = 8192
"""Bytes of shared memory that decodes need for other things than keys and values."""
NARROW = 64
"""Heads of so few numbers behind a window have few tiles to load ahead; with three stages ptxas 12.9 lets a product of sm90 look for keys
where another address was (`ci/cross_compile.py`)."""
WAVE = 128
"""Programs of a shared beginning: its tiles are large, one a multiprocessor."""


class Part(NamedTuple):
    """Requests of a step that one launch takes.

    Attributes:
        batch: the requests; its query tokens are `tokens` of the step's.
        tile: how it is cut. splits: of the keys, a power of two. shared: of the keys that decodes share, read once; 0 for none.
        single: takes the requests of one query token, and leaves the others alone. fewest: leaves alone those of fewer tokens.
        arrived: zeros, one for each request and KV head, with which the last of a group's programs is found, that merges the splits;
            None: a kernel of its own merges them.
    """

    batch: PagedBatch
    tokens: slice
    tile: Tile
    splits: int
    shared: int
    single: bool
    fewest: int
    arrived: torch.Tensor | None = None


class AttentionPlan(NamedTuple):
    """The launches of a step; `covered` where they write every token, padding included."""

    parts: tuple[Part, ...]
    covered: bool


EARLY_REQUESTS = 4
"""With more, blocks that wait for the kernel before them take the room of those that work (8 rows: 1.12 ms a step without, 1.17 with)."""


def early_of(part: Part) -> dict[str, Any]:
    return early(part.batch.seq_lens.device) if part.batch.seq_lens.shape[0] <= EARLY_REQUESTS else {"EARLY": False}


def results(q: torch.Tensor, batch: PagedBatch, facts: AttentionFacts, covered: bool) -> torch.Tensor:
    """Room for `[tokens, heads, v_dim]`. Padding tokens, which no program writes, are 0 already: a finite number."""
    out = torch.empty(q.shape[0], facts.num_heads, facts.v_dim, dtype=q.dtype, device=q.device)
    if not covered and len(out):
        zero_padding[(triton.cdiv(len(out), 8),)](
            out, batch.query_start, len(batch.query_start), len(out), facts.num_heads * facts.v_dim, ROWS=8, BLOCK=1024
        )
    return out


def suited(tile: Tile, dim: int, half: bool, device: torch.device) -> Tile:
    """The tile, for heads of `dim` numbers, as the device's matrix units and loads want it. `half`: pages hold float8."""
    if waves_of_32(device):
        return in_registers(tile, dim)
    tile = by_warps(tile, dim, half) if narrow_units(device) else tile
    return tile._replace(descriptor=tile.descriptor and describes(device))


class PagedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks, slopes, bias)`, as in `ops.attention.PagedAttentionReference`."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self.group = facts.num_heads // facts.num_kv_heads
        self.block_d = max(triton.next_power_of_2(facts.head_dim), 16)
        self.block_dv = max(triton.next_power_of_2(facts.v_dim), 16)
        self.half = facts.kv_dtype == "float8_e4m3fn" and facts.dtype != "float32"
        self._descriptors: dict[tuple[object, ...], TensorDescriptor] = {}
        self._zeros: dict[tuple[torch.device, int], torch.Tensor] = {}

    def plan(self, batch: PagedBatch, buffers: Any | None = None, after: int = 0) -> AttentionPlan:
        """Decodes behind prompts get a launch of their own. `after`: tokens before the batch's, which are no concern here."""
        tokens = batch.slots.shape[0]
        everything = slice(after, after + tokens)
        if batch.max_query <= 1:
            return AttentionPlan((self.part(batch, everything),), tokens == batch.seq_lens.shape[0])
        if batch.replayed:
            return AttentionPlan((self.part(batch, everything, fewest=2), self.part(batch, everything, single=True)), False)
        if batch.lengths is None:
            return AttentionPlan((self.part(batch, everything),), False)
        prompts = batch.lengths.prompts
        first = int(batch.lengths.query_start[prompts])
        parts = [self.part(batch.rows(0, prompts), slice(0, first))] if prompts else []
        if prompts < len(batch.lengths.seq_lens):
            parts.append(self.part(batch.rows(prompts), slice(first, int(batch.lengths.query_start[-1]))))
        return AttentionPlan(tuple(parts), int(batch.lengths.query_start[-1]) == tokens)

    def part(
        self, batch: PagedBatch, tokens: slice, tile: Tile | None = None, splits: int = 0, single: bool = False, fewest: int = 0
    ) -> Part:
        """One launch, with the tile and splits that the table has unless they are given."""
        facts, single = self.facts, single or batch.max_query <= 1
        rows = self.group * (1 if single else min(max(batch.max_query, 1), 128))
        dim, nbytes = max(self.block_d, self.block_dv), 4 if facts.dtype == "float32" else 2
        device, requests = batch.seq_lens.device, batch.seq_lens.shape[0]
        chosen = tile or tile_of(rows, dim, nbytes, facts.page_size, shared_memory(device), self.half, requests)
        chosen = suited(chosen, dim, self.half, device) if tile is None else chosen
        # A stage holds a tile of keys or of values; beside them are the queries, or the weights on their way from one product to the next.
        stages = fitting_stages(device, min(chosen.stages, most_stages(device, facts.bias)), chosen.keys * dim * nbytes, BESIDE)
        if facts.window and dim <= NARROW and not single:
            stages = min(stages, 2)
        chosen = chosen._replace(rows=max(chosen.rows, triton.next_power_of_2(self.group)), stages=stages)
        shared = self._shared(batch) if single else 0
        splits = splits or (self._splits(batch) if single else 1)
        joined = single and 1 < shared + splits <= JOINED and self.group * self.block_dv <= TOGETHER
        return Part(batch, tokens, chosen, splits, shared, single, fewest, self.arrived(batch) if joined else None)

    def arrived(self, batch: PagedBatch) -> torch.Tensor:
        """Zeros for a part's programs to count with, which leave zeros: the same for all layers and steps, which run one after the other.
        Made while a step is planned, not while it is captured."""
        size = triton.next_power_of_2(max(batch.seq_lens.shape[0] * self.facts.num_kv_heads, PROGRAMS))
        key = batch.seq_lens.device, size
        if key not in self._zeros:
            self._zeros[key] = torch.zeros(size, dtype=torch.int32, device=key[0])
        return self._zeros[key]

    def _splits(self, batch: PagedBatch) -> int:
        """Enough programs for a large device: decode rows × KV heads × splits."""
        programs = max(batch.seq_lens.shape[0] * self.facts.num_kv_heads, 1)
        visible = min(batch.max_seq, self.facts.window or self.facts.chunk or batch.max_seq)
        wanted = min(-(-PROGRAMS // programs), -(-visible // KEYS), 64)
        return int(triton.next_power_of_2(max(wanted, 1)))

    def _shared(self, batch: PagedBatch) -> int:
        facts = self.facts
        plain = facts.causal and not (facts.window or facts.chunk or facts.alibi or facts.bias)
        if batch.shared is None or not plain or max(self.block_d, self.block_dv) > 128:
            return 0
        blocks = -(-batch.seq_lens.shape[0] * self.group // SHARED.rows) * facts.num_kv_heads
        return min(max(triton.next_power_of_2(WAVE // blocks + 1) // 2, 1), 16)

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: AttentionPlan | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = plan or self.plan(batch)
        out = results(q, batch, self.facts, plan.covered)
        for part in plan.parts:
            self.run_part(part, q[part.tokens], k_pages, v_pages, out[part.tokens], sinks, slopes, bias)
        return out

    def run_part(
        self, part: Part, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor,
        sinks: torch.Tensor | None, slopes: torch.Tensor | None, bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """One part; q and out hold its tokens alone."""
        facts, slots, requests = self.facts, part.shared + part.splits, part.batch.seq_lens.shape[0]
        if q.shape[0] == 0 or requests == 0:
            return
        partial = lse = out
        if slots > 1:
            partial = torch.empty(requests, facts.num_heads, slots, facts.v_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(requests, facts.num_heads, slots, 2, dtype=torch.float32, device=q.device)
        if part.shared:
            self._attend_shared(part, q, k_pages, v_pages, partial, lse)
        self._attend(part, q, k_pages, v_pages, out, partial, lse, sinks, slopes, bias)
        if slots > 1 and part.arrived is None:
            merge[(requests, facts.num_heads)](
                partial, lse, out, part.batch.query_start, out if sinks is None else sinks, slots, out.stride(0), out.stride(1),
                HEADS=facts.num_heads, DV=facts.v_dim, BLOCK_DV=self.block_dv, MOST=SLOTS, BLOCK_S=16, SINKS=sinks is not None,
                **early_of(part),
            )  # fmt: skip

    def _attend(self, part: Part, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, out: torch.Tensor,
                partial: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, slopes: torch.Tensor | None,
                bias: torch.Tensor | None) -> None:  # fmt: skip
        facts, batch, tile, requests = self.facts, part.batch, part.tile, part.batch.seq_lens.shape[0]
        block_q = 1 if part.single else max(tile.rows // self.group, 1)
        blocks = requests if part.single else q.shape[0] // block_q + requests
        described, keys, values = self._pages(k_pages, v_pages, tile)
        arrived, heads = None if partial is out else part.arrived, triton.next_power_of_2(self.group)
        attend[(blocks, facts.num_kv_heads, part.splits)](
            q, keys, values, out, partial, lse, out if arrived is None else arrived, batch.query_start, batch.seq_lens, batch.block_table,
            batch.seq_lens if batch.shared is None else batch.shared,
            out if sinks is None else sinks, out if slopes is None else slopes, out if bias is None else bias.contiguous(),
            facts.scale, facts.softcap or 0.0, requests, blocks, part.splits, part.shared, part.shared + part.splits,
            1 if bias is None else bias.shape[1],
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            batch.block_table.stride(0),
            HEADS=facts.num_heads, GROUP=self.group, BLOCK_Q=block_q, BLOCK_M=tile.rows, SINGLE=part.single,
            TILE=tile.keys, PAGE=facts.page_size, D=facts.head_dim, DV=facts.v_dim, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv,
            WINDOW=facts.window or 0, CHUNK=facts.chunk or 0, CAUSAL=facts.causal, SOFTCAP=facts.softcap is not None,
            SINKS=sinks is not None, ALIBI=slopes is not None, BIAS=bias is not None, PARTIAL=part.shared + part.splits > 1,
            JOIN=arrived is not None, BLOCK_H=heads, BLOCK_S=max(READ // (heads * self.block_dv), 1),
            FEWEST=part.fewest, DESCRIPTOR=described, STAGES=tile.stages, HALF=self.half,
            num_warps=tile.warps, num_stages=tile.stages, **early_of(part),
        )  # fmt: skip

    def _attend_shared(self, part: Part, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                       partial: torch.Tensor, lse: torch.Tensor) -> None:  # fmt: skip
        facts, batch, requests = self.facts, part.batch, part.batch.seq_lens.shape[0]
        dim = max(self.block_d, self.block_dv)
        tile = suited(SHARED if facts.dtype != "float32" else float32_tile(SHARED.rows, dim), dim, self.half, q.device)
        tile = tile._replace(stages=min(tile.stages, most_stages(q.device)))
        described, keys, values = self._pages(k_pages, v_pages, tile)
        attend_shared[(-(-requests * self.group // tile.rows), facts.num_kv_heads, part.shared)](
            q, keys, values, partial, lse, batch.query_start, batch.block_table, batch.shared, facts.scale, facts.softcap or 0.0, requests,
            part.shared, part.shared + part.splits, q.stride(0), q.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3],
            batch.block_table.stride(0),
            HEADS=facts.num_heads, GROUP=self.group, BLOCK_M=tile.rows, TILE=tile.keys, PAGE=facts.page_size, D=facts.head_dim,
            DV=facts.v_dim, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv, SOFTCAP=facts.softcap is not None, DESCRIPTOR=described,
            STAGES=tile.stages, HALF=self.half, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _pages(self, k_pages: torch.Tensor, v_pages: torch.Tensor, tile: Tile) -> tuple[bool, Any, Any]:
        """K and V as the kernel takes them, through descriptors where it can."""
        k_pages, v_pages = as_stored(k_pages), as_stored(v_pages)
        if not (tile.descriptor and self._describable(k_pages, v_pages, tile.keys)):
            return False, k_pages, v_pages
        return True, self._descriptor(k_pages, tile.keys, self.block_d), self._descriptor(v_pages, tile.keys, self.block_dv)

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
