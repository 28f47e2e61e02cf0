"""Grouped-query attention over paged KV: projections, norms of q and k, rotation, cache write, attention, output projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.errors import KernelError
from pagoda.hal.kv import CacheKind, LayerCache, LayerPages
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Shard, Span
from pagoda.models.rope import Rope
from pagoda.models.spec import Alibi, Attention, QkNorm
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.rope import RopeFacts


class Step(NamedTuple):
    """What the layers of one forward share: a batch and plans per cache group, cos and sin per rope."""

    groups: tuple[PagedBatch, ...]
    plans: tuple[Any, ...]
    ropes: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class AttentionBlock:
    """One layer's attention on one rank.

    Attributes:
        cache: what it stores per token.
        facts: of the attention primitive, with the page size of the last `bind`.
        rope_index: which of the step's ropes turns its q and k.
    """

    rope_index: int
    _pages: LayerPages

    def __init__(self, build: Builder, path: str, spec: Attention, width: int) -> None:
        self.spec = spec
        heads, kv = build.shard.split(spec.heads, "attention heads"), build.shard.kv_heads(spec.kv_heads)
        self._heads, self._kv_heads = len(heads), len(kv)
        q, k = heads.times(spec.head_dim), kv.times(spec.head_dim)
        whole = Span.whole(width)
        self._sizes = [len(q), len(k), len(k)]
        self._qkv = build.linear(path, {"q": q, "k": k, "v": k}, whole, "column", spec.qkv_bias)
        self._out = build.linear(path, {"o": whole}, q, "row", spec.out_bias)
        self._qk_norm = _qk_norm(build, path, spec.qk_norm, spec)
        self._sinks = build.tensor(f"{path}.sinks", (heads,), "heads") if spec.sinks else None
        self._slopes = _slopes(spec, heads, build)
        self.facts = self._facts(build)
        self.cache = self._cache(build)
        self._rope = self._rope_kernel(build)
        for op in ("write_kv", "paged_attention"):
            build.uses.append((op, self._usable(build.table, op)))

    def page_sizes(self, table: KernelTable) -> tuple[int, ...]:
        """Tokens per page that a kernel fits, in the device's order."""
        return tuple(size for size in table.info.limits.page_sizes if _fits(table, replace(self.facts, page_size=size)))

    def bind(self, table: KernelTable, pages: LayerPages | None, group: int, page_size: int, planner: int) -> None:
        """Resolve the kernels for this page size. `planner`: which of the group's plans is this layer's."""
        self.facts = replace(self.facts, page_size=page_size)
        self.kernel = table.resolve("paged_attention", self.facts)
        self._attend, self._write = self.kernel.run, table.resolve("write_kv", self.facts).run
        self._group, self._planner = group, planner
        if pages is not None:
            self._pages = pages

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        q, k, v = self._qkv(x).split(self._sizes, dim=-1)
        if self.spec.clip is not None:
            q, k, v = (t.clamp(-self.spec.clip, self.spec.clip) for t in (q, k, v))
        q, k = self._position(q, k, step)
        batch, plans = step.groups[self._group], step.plans[self._group] if step.plans else None
        k_pages, v_pages = self._pages
        self._write(k, v.unflatten(-1, (self._kv_heads, -1)), k_pages, v_pages, batch.slots)
        plan = plans[self._planner] if plans else None
        return self._out(self._attend(q, k_pages, v_pages, batch, plan, self._sinks, self._slopes).flatten(1))

    def _position(self, q: torch.Tensor, k: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        norm = self._qk_norm
        if norm is not None and not norm.after_rope:
            q, k = norm(q, k)
        q, k = q.unflatten(-1, (self._heads, -1)), k.unflatten(-1, (self._kv_heads, -1))
        if self._rope is not None:
            q, k = self._rope(q, k, *step.ropes[self.rope_index])
        if norm is not None and norm.after_rope:
            q, k = norm(q.flatten(1), k.flatten(1))
            q, k = q.unflatten(-1, (self._heads, -1)), k.unflatten(-1, (self._kv_heads, -1))
        return q, k

    def _facts(self, build: Builder) -> AttentionFacts:
        window, chunk = _windows(self.spec)
        return AttentionFacts(
            dtype=build.numerics.dtype,
            kv_dtype=build.numerics.kv_dtype,
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=self.spec.head_dim,
            v_dim=self.spec.head_dim,
            page_size=16,
            scale=self.spec.scale,
            window=window,
            chunk=chunk,
            softcap=self.spec.softcap,
            sinks=self.spec.sinks,
            alibi=isinstance(self.spec.position, Alibi),
        )

    def _cache(self, build: Builder) -> LayerCache:
        kinds = {None: CacheKind.FULL, "sliding": CacheKind.SLIDING, "chunked": CacheKind.CHUNKED}
        window = self.spec.window
        kind = kinds[window.kind if window else None]
        dim = self.spec.head_dim
        return LayerCache(kind, self._kv_heads, dim, dim, build.numerics.kv_dtype, window.size if window else None)

    def _rope_kernel(self, build: Builder) -> Any:
        if not isinstance(self.spec.position, Rope):
            return None
        kernel = build.kernel(
            "rope", RopeFacts(build.numerics.dtype, self.spec.head_dim, self.spec.position.dims, self.spec.position.style)
        )
        return kernel.run if build.loading else None

    def _usable(self, table: KernelTable | None, op: str) -> AttentionFacts:
        if table is None:
            return self.facts
        fitting = [replace(self.facts, page_size=size) for size in table.info.limits.page_sizes]
        return next((facts for facts in fitting if _chooses(table, op, facts)), fitting[0])


class _QkNorms:
    """Norms of q and k, `[T, heads · dim]` each. Over the full width, ranks gather it first: the statistic spans all heads."""

    def __init__(self, q: NormBlock, k: NormBlock, spec: QkNorm, head_dim: int, shard: Shard, communicator: Communicator | None) -> None:
        self._q, self._k = q, k
        self.after_rope = spec.after_rope
        self._full = spec.extent == "full"
        self._head_dim = head_dim
        self._shard = shard
        self._communicator = communicator

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._full:
            return self._over_ranks(self._q, q), self._over_ranks(self._k, k)
        return self._each_head(self._q, q), self._each_head(self._k, k)

    def _each_head(self, norm: NormBlock, x: torch.Tensor) -> torch.Tensor:
        return norm(x.unflatten(-1, (-1, self._head_dim))).flatten(1)

    def _over_ranks(self, norm: NormBlock, x: torch.Tensor) -> torch.Tensor:
        if self._communicator is None:
            return norm(x)
        gathered = self._communicator.all_gather(x.contiguous(), dim=-1)
        return norm(gathered).chunk(self._shard.world, dim=-1)[self._shard.rank]


def _qk_norm(build: Builder, path: str, spec: QkNorm | None, attention: Attention) -> _QkNorms | None:
    if spec is None:
        return None
    full = spec.extent == "full"
    if full and build.shard.world > attention.kv_heads:
        raise KernelError(
            f"{path}: a norm over the full width of {attention.kv_heads} KV heads cannot be split over {build.shard.world} ranks"
        )
    widths = [attention.head_dim * (heads if full else 1) for heads in (attention.heads, attention.kv_heads)]
    q, k = (build.norm(f"{path}.{name}_norm", spec.norm, width) for name, width in zip("qk", widths, strict=True))
    assert q is not None and k is not None
    return _QkNorms(q, k, spec, attention.head_dim, build.shard, build.communicator)


def _windows(spec: Attention) -> tuple[int | None, int | None]:
    if spec.window is None:
        return None, None
    return (spec.window.size, None) if spec.window.kind == "sliding" else (None, spec.window.size)


def _slopes(spec: Attention, heads: Span, build: Builder) -> torch.Tensor | None:
    if not isinstance(spec.position, Alibi) or not build.loading:
        return None
    return (
        torch.tensor(alibi_slopes(spec.heads, spec.position.max_bias)[heads.index], dtype=torch.float32, device=build.torch_device)
        * spec.position.scale
    )


def alibi_slopes(heads: int, max_bias: float = 8.0) -> Sequence[float]:
    """A slope per head: powers of 2^(−max_bias / n), n the power of two at or above; when heads < n, every second first."""
    n = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-max_bias * (i + 1) / n) for i in range(n)]
    return slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads]


def _fits(table: KernelTable, facts: AttentionFacts) -> bool:
    return _chooses(table, "paged_attention", facts) and _chooses(table, "write_kv", facts)


def _chooses(table: KernelTable, op: str, facts: AttentionFacts) -> bool:
    try:
        table.choose(op, facts)
    except KernelError:
        return False
    return True
