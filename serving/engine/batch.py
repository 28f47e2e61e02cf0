"""Packs a `StepPlan` into one staging buffer with numpy and carries it to the device in one copy; a `StepBatch` is the views there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.hal.device import Device
from pagoda.hal.graphs import GraphPolicy
from pagoda.hal.memory import MemoryKind
from pagoda.ops.attention import HostLengths, PagedBatch, TreeMask
from pagoda.ops.segment_attention import Segments
from pagoda.serving.engine.burst_steps import BurstViews, fill_later
from pagoda.serving.engine.cascade import allowed_beginnings
from pagoda.serving.engine.layout import ALIGNMENT, DIMS, FIRST, HEADER_WORDS, Layout, layout_of
from pagoda.serving.engine.packed import device_views, host_views, put
from pagoda.serving.engine.params import MAX_LOGPROBS
from pagoda.serving.engine.plan import IntArray, LongArray, StepPlan
from pagoda.serving.engine.rare_columns import COUNTED, SPLIT, WHOLE, Extras, every_mask, rare_columns, whole_columns
from pagoda.serving.engine.samples import Samples, branches, samples_of
from pagoda.serving.engine.settings import SamplingSlots, Use
from pagoda.serving.engine.trees import Tree, tree_of

Arrays = Mapping[str, NDArray[Any]]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """Sizes that a step is padded to; None pads nothing. use: what its rows are sampled with beside what they need (`settings.Use`).
    share: see `allowed_beginnings`."""

    tokens: int | None = None
    rows: int | None = None
    use: int = 0
    share: frozenset[tuple[bool, ...]] | None = None


class Cross(NamedTuple):
    """Of each cache group the most tokens that an encoder gives (0: it holds the sequences' own), and those of the step's rows."""

    longest: tuple[int, ...]
    lengths: IntArray


@dataclass(frozen=True)
class StepBatch:
    """A step on the device.

    Attributes:
        layout: where its arrays lie. views: the arrays on the device, by section name.
        num_tokens, num_rows, num_samples: real ones; padded ones are in the shapes.
        uniform: every row has one query token. use: what the sampled rows need of the sampler.
        max_query, max_seq: exact bounds on the host.
        top_logprobs: largest top-k asked for. samples: what is sampled, on the host.
        lengths: of the rows, exact; None in decode steps, whose kernels need none of the host.
        shared: of each cache group, whether its rows share a beginning (`PagedBatch.shared`). alike: likewise, whatever the bucket allows.
        taps: layers whose hidden states are wanted, of the tokens in the view `tap_rows`. routed: the chosen experts are.
        burst: of a plan with runs, the part that its captured steps read, and what it holds in the steps after the first.
        cross: of models with an encoder.
    """

    layout: Layout
    views: Tensors
    num_tokens: int
    num_rows: int
    num_samples: int
    uniform: bool
    use: int
    max_query: int
    max_seq: int
    top_logprobs: int
    samples: Samples
    lengths: HostLengths | None = None
    shared: tuple[bool, ...] = ()
    alike: tuple[bool, ...] = ()
    taps: tuple[int, ...] = ()
    routed: bool = False
    burst: BurstViews | None = None
    cross: Cross | None = None

    @property
    def every_row_sampled(self) -> bool:
        """Whether the sampled rows are the step's tokens, in order."""
        return self.uniform and self.num_samples == self.num_rows

    def segments(self) -> Segments:
        """Its rows as whole prompts."""
        return Segments(self.views["query_start"], self.lengths.query_start if self.lengths is not None else None)

    def groups(self, tables: tuple[torch.Tensor, ...] | None = None, max_seq: int | None = None) -> tuple[PagedBatch, ...]:
        """A `PagedBatch` per cache group; captured steps bring stable `tables` and their own bound of lengths."""
        views = self.views
        count = self.layout.dims[DIMS.index("groups")]
        groups = tuple(
            PagedBatch(
                query_start=views["query_start"],
                seq_lens=views["seq_lens"],
                block_table=tables[group] if tables is not None else views[f"table{group}"],
                slots=views["kv_slots"][group],
                max_query=self.max_query if tables is None or self.uniform else len(views["token_ids"]),
                max_seq=self.max_seq if max_seq is None else max_seq,
                tree=TreeMask(views["tree_nodes"], views["tree_seen"]) if "tree_nodes" in views else None,
                lengths=self.lengths,
                replayed=tables is not None,
                shared=views["shared"][group] if self.shared and self.shared[group] else None,
            )
            for group in range(count)
        )
        if self.cross is None:
            return groups
        longest = self.cross.longest
        return tuple(self._crossed(batch, most) if most else batch for batch, most in zip(groups, longest, strict=True))

    def _crossed(self, batch: PagedBatch, longest: int) -> PagedBatch:
        """The view of a group whose keys are an encoder's."""
        assert self.cross is not None
        lengths = self.cross.lengths
        host = HostLengths(self.lengths.query_start, lengths) if self.lengths is not None else None
        most = longest if batch.replayed else int(lengths.max())
        return replace(batch, seq_lens=self.views["cross_lens"], max_seq=most, lengths=host, tree=None)


class BatchPacker:
    """Owns the buffers of one rank: a ring of pinned host buffers and one on the device, grown when a step does not fit.

    Args:
        device: whose memory they lie in.
        page_sizes: tokens per page of each cache group; 0 where pages hold states or what encoders gave.
        crossed: of groups that hold what encoders gave the most tokens of it, 0 for the others; none where there is no such group.
        slots: the sampling settings that are gathered into each step.
        capacity: bytes to begin with.
        depth: steps whose copies may be under way at once.
        widths: of each group the columns of the longest sequence's table, which all have where shapes are static.
        every_mask: a step with masks has one for each row that it samples.
    """

    def __init__(
        self,
        device: Device,
        page_sizes: tuple[int, ...],
        slots: SamplingSlots,
        capacity: int,
        depth: int,
        crossed: tuple[int, ...] = (),
        widths: tuple[int, ...] = (),
        every_mask: bool = False,
    ) -> None:
        self.device = device
        self.every_mask = every_mask
        self.page_sizes = page_sizes
        self.crossed = crossed
        self.slots = slots
        self.policy = device.graphs.policy
        self.widths = widths if self.policy.static_shapes else ()
        self.generation = 0
        self._ring = depth + 1
        self._turn = 0
        self._grow(capacity)

    def pack(self, plan: StepPlan, bucket: Bucket | None = None, extras: Extras | None = None) -> StepBatch:
        """Write the step into the next staging buffer and start its copy.

        The buffer is used again `depth + 1` calls later: by then the caller must have seen this step's result.
        """
        sizes = (self.page_sizes, self.policy, self.widths, self.every_mask)
        columns = _columns(plan, self.slots, bucket or Bucket(), extras or Extras(), *sizes)
        layout = layout_of(tuple(columns.dims.get(name, 0) for name in DIMS))
        later, end = plan.num_steps - 1, layout.nbytes
        if later:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + later * layout.fixed
        if end > self._capacity:
            self._grow(end)
        self._turn = (self._turn + 1) % self._ring
        host = self._host[self._turn]
        arrays = self._host_views(self._turn, layout)
        layout.write_header(self._headers[self._turn], plan.num_tokens, plan.num_rows)
        columns.fill(arrays, self.page_sizes)
        if later:
            fill_later(
                host.numpy()[begin:end].reshape(later, layout.fixed), host.numpy(), layout, plan, self.page_sizes, len(self.slots.use)
            )
        self._device[:end].copy_(host[:end], non_blocking=True)
        batch = columns.batch(layout, self._device_views(layout), self.crossed)
        return replace(batch, burst=self._burst_views(layout, later, begin)) if later else batch

    def _grow(self, capacity: int) -> None:
        """New buffers, half as large again as needed; earlier views and captured steps are void (`generation` says so)."""
        self._capacity = capacity + capacity // 2
        self._host = [self.device.memory.host((self._capacity,), torch.uint8) for _ in range(self._ring)]
        self._headers = [host.numpy()[: HEADER_WORDS * 8].view(np.int64) for host in self._host]
        self._device = self.device.memory.alloc(MemoryKind.WORK, (self._capacity,), torch.uint8)
        self._host_cache: dict[tuple[int, Layout], Arrays] = {}
        self._device_cache: dict[Layout, Tensors] = {}
        self._burst_cache: dict[tuple[Layout, int], BurstViews] = {}
        self.generation += 1

    def _host_views(self, turn: int, layout: Layout) -> Arrays:
        key = (turn, layout)
        if key not in self._host_cache:
            _bound(self._host_cache)
            self._host_cache[key] = host_views(self._host[turn].numpy(), layout)
        return self._host_cache[key]

    def _burst_views(self, layout: Layout, later: int, begin: int) -> BurstViews:
        key = (layout, later)
        if key not in self._burst_cache:
            _bound(self._burst_cache)
            parts = self._device[begin : begin + later * layout.fixed].view(later, layout.fixed).unbind(0)
            self._burst_cache[key] = BurstViews(self._device[FIRST : FIRST + layout.fixed], parts)
        return self._burst_cache[key]

    def _device_views(self, layout: Layout) -> Tensors:
        if layout not in self._device_cache:
            _bound(self._device_cache)
            self._device_cache[layout] = device_views(self._device, layout)
        return self._device_cache[layout]


def _bound(cache: dict[Any, Any]) -> None:
    if len(cache) >= 256:
        cache.clear()


@dataclass(frozen=True)
class _Columns:
    """What will be written: sizes first, so that the layout is known, then the arrays themselves."""

    plan: StepPlan
    bucket: Bucket
    extras: Extras
    dims: dict[str, int]
    slots: SamplingSlots
    samples: Samples
    sample_slots: IntArray
    use: int
    rare: dict[str, NDArray[Any]]
    tree: Tree | None
    shared: tuple[IntArray | None, ...]
    alike: tuple[bool, ...]

    def fill(self, out: Arrays, page_sizes: tuple[int, ...]) -> None:
        plan, tokens, rows = self.plan, self.plan.num_tokens, self.plan.num_rows
        bounds = out["query_start"]
        bounds[0] = 0
        np.cumsum(plan.lengths, out=bounds[1 : rows + 1])
        bounds[rows + 1 :] = tokens
        owner = np.arange(rows) if tokens == rows else np.repeat(np.arange(rows), plan.lengths)
        places = plan.starts[owner] + (np.arange(tokens) - bounds[:-1][owner])
        positions = places if self.tree is None else places - self.tree.shift
        put(out["token_ids"], plan.token_ids)
        put(out["token_slots"], plan.slots[owner])
        put(out["seq_lens"], plan.starts + plan.lengths)
        if plan.cross_lengths is not None:
            put(out["cross_lens"], plan.cross_lengths)
        if self.extras.positions is not None:
            put(out["positions"], self.extras.positions)
        else:
            put(out["positions"], positions[None])
        if plan.adapters is not None:
            put(out["adapters"], plan.adapters[owner], pad=-1)
        for group, size in enumerate(page_sizes):
            self._fill_group(out, group, size, owner, places)
            shared = self.shared[group]
            put(out["shared"][group], _NOTHING if shared is None else shared)
        if self._pads_rows:
            self._pad_uniform(out)
        self._fill_samples(out)
        for name, array in self.rare.items():
            if name in out:
                put(out[name], array)

    def batch(self, layout: Layout, views: Tensors, crossed: tuple[int, ...]) -> StepBatch:
        plan, asked = self.plan, self.slots.top_logprobs[self.sample_slots]
        return StepBatch(
            layout=layout,
            views=views,
            num_tokens=plan.num_tokens,
            num_rows=plan.num_rows,
            num_samples=len(self.samples.rows),
            uniform=plan.num_tokens == plan.num_rows,
            use=self.use,
            max_query=int(plan.lengths.max()),
            max_seq=int((plan.starts + plan.lengths).max()),
            top_logprobs=self._top_logprobs(asked),
            samples=self.samples,
            lengths=None if plan.num_tokens == plan.num_rows else self._lengths(),
            shared=tuple(shared is not None for shared in self.shared),
            alike=self.alike,
            taps=plan.taps,
            routed=plan.routed is not None,
            cross=Cross(crossed, plan.cross_lengths) if plan.cross_lengths is not None else None,
        )

    def _lengths(self) -> HostLengths:
        plan = self.plan
        starts = np.concatenate([np.zeros(1, np.int32), np.cumsum(plan.lengths, dtype=np.int32)])
        return HostLengths(starts, (plan.starts + plan.lengths).astype(np.int32))

    def _top_logprobs(self, asked: IntArray) -> int:
        if self.use == WHOLE:
            return min(MAX_LOGPROBS, self.slots.vocab)
        return int(asked.max()) if self.use & Use.LOGPROBS else 0

    @property
    def _pads_rows(self) -> bool:
        """A padded decode step pads with whole rows, one token each, which read and write page 0."""
        return self.plan.num_rows == self.plan.num_tokens and self.dims["tokens"] == self.dims["rows"] > self.plan.num_rows

    def _fill_group(self, out: Arrays, group: int, size: int, owner: LongArray, places: LongArray) -> None:
        table, target = self.plan.block_tables[group], out[f"table{group}"]
        rows, width = table.shape
        target[:rows, :width] = table
        target[rows:] = 0
        target[:, width:] = 0
        if not size:
            out["kv_slots"][group] = 0
            return
        page = table[owner, np.minimum(places // size, width - 1)]
        put(out["kv_slots"][group], page.astype(np.int64) * size + places % size)

    def _pad_uniform(self, out: Arrays) -> None:
        rows = self.plan.num_rows
        out["query_start"][rows + 1 :] = np.arange(rows + 1, self.dims["rows"] + 1)
        out["seq_lens"][rows:] = 1
        if self.plan.cross_lengths is not None:
            out["cross_lens"][rows:] = 1

    def _fill_samples(self, out: Arrays) -> None:
        if not self.dims["samples"]:
            return
        slots, chosen = self.slots, self.sample_slots
        samples = self.samples
        put(out["sample_rows"], out["query_start"][1:][samples.rows] - 1 - samples.behind)
        put(out["sample_slots"], chosen, pad=len(slots.use))
        if not self.dims["sampling"]:
            return
        put(out["draws"], self.plan.draws[samples.rows] + samples.depths)
        for name in ("seed", "temperature", "top_p", "min_p", "top_k"):
            put(out[name], getattr(slots, name)[chosen])


_NOTHING = np.zeros(0, np.int32)


def _columns(
    plan: StepPlan,
    slots: SamplingSlots,
    bucket: Bucket,
    extras: Extras,
    page_sizes: tuple[int, ...],
    policy: GraphPolicy,
    widths: tuple[int, ...],
    masks_of_all: bool,
) -> _Columns:
    samples = samples_of(plan)
    chosen = plan.slots[samples.rows]
    # A grammar's masks come with the plan; for the sampler they are one use with a slot's own allowed tokens.
    use = slots.uses(chosen) | (Use.ALLOWED if plan.mask_rows is not None else 0) | bucket.use
    static = policy.static_shapes and bucket.rows is not None
    if bucket.tokens and plan.num_tokens > plan.num_rows:
        # One capture serves rows of all temperatures: there are many sizes of steps with prompts.
        use |= Use.RANDOM | (Use.FILTER if static else 0)
    rows = bucket.rows or plan.num_rows
    rare = rare_columns(plan, slots, samples, use, extras)
    if static and use & SPLIT:
        use = WHOLE  # one program of the sampler serves rows of all kinds
        rare = whole_columns(rare, slots, chosen, rows)
    elif masks_of_all and use & Use.ALLOWED:
        rare = every_mask(rare, slots, rows if bucket.rows else len(samples.rows))
    tree = tree_of(plan) if plan.drafts is not None and plan.parents is not None and branches(plan.drafts, plan.parents) else None
    if tree is not None:
        rare.update(tree_nodes=tree.nodes, tree_seen=tree.seen)
    shared, alike = allowed_beginnings(plan, page_sizes, policy.shared, bucket.share)
    dims = {
        "tokens": bucket.tokens or plan.num_tokens,
        "rows": rows,
        "bounds": rows + 1,
        "samples": rows if bucket.rows else len(samples.rows),
        "sampling": int(bool(use & Use.RANDOM)),
        "axes": 1 if extras.positions is None else len(extras.positions),
        "groups": len(page_sizes),
        "adapters": int(plan.adapters is not None),
        "drafts": plan.drafts.shape[1] if plan.drafts is not None else 0,
        "parents": plan.parents.shape[1] if plan.parents is not None else 0,
        "trees": int(tree is not None),
        "cross": int(plan.cross_lengths is not None),
        **{f"width{group}": max((table.shape[1], *widths[group : group + 1])) for group, table in enumerate(plan.block_tables)},
        "verified": int("sample_before" in rare),
        "words": (slots.vocab + 31) // 32,
        **{name: len(rare.get(column, ())) for name, column in COUNTED.items()},
    }
    return _Columns(plan, bucket, extras, dims, slots, samples, chosen, use, rare, tree, shared, alike)
