"""Grouped-query attention over paged KV: projections, norms of q and k, rotation, cache write, attention, output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.errors import ConfigError
from pagoda.hal.kv import CacheKind, LayerCache, LayerPages, stored_dim
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.blocks.paged import PagedMixer, Step
from pagoda.models.builder import Builder
from pagoda.models.distance import Distances, backward_bias
from pagoda.models.parallel.shard import Shard, Span
from pagoda.models.rope import Rope
from pagoda.models.spec import Alibi, Attention, QkNorm, Temper
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.rope import RopeFacts


class AttentionBlock(PagedMixer):
    """One layer's attention on one rank."""

    _norm_last: bool = False
    _rope_write: Callable[..., torch.Tensor] | None = None
    _scales: tuple[float, float] | None = None  # of k and v in float8 pages

    def __init__(self, build: Builder, path: str, spec: Attention, width: int, out_width: int | None = None) -> None:
        self.spec = spec
        heads, kv = build.shard.split(spec.heads, "attention heads"), build.shard.kv_heads(spec.kv_heads)
        self._heads, self._kv_heads = len(heads), len(kv)
        q, k, v = heads.times(spec.head_dim), kv.times(spec.head_dim), kv.times(spec.value_dim)
        out = heads.times(spec.value_dim)
        whole = Span.whole(width)
        self._sizes = [len(q), len(k), len(v), *([len(out)] if spec.gated else [])]
        parts = {"q": q, "k": k, "v": v, **({"gate": out} if spec.gated else {})}
        self.first = build.linear(path, parts, whole, "column", spec.qkv_bias)
        self._out = build.linear(path, {"o": Span.whole(out_width or width)}, out, "row", spec.out_bias)
        self._q_norm, self._k_norm = self._norms(build, path, heads, kv)
        self._sinks = build.tensor(f"{path}.sinks", (heads,), "heads") if spec.sinks else None
        self._slopes = _slopes(spec, heads, build)
        self._bias = self._distances(build, path, heads)
        self._rope = self._rope_kernel(build)
        self.begin(build, path)

    def begin(self, build: Builder, path: str) -> None:
        """What stands on the cache: its kernels, and those that are joined with the write to it."""
        PagedMixer.__init__(self, build, self._facts(build), self._cache(build))
        self._scales = build.kv_scales(path) if build.numerics.kv_dtype == "float8_e4m3fn" else None
        self._site = build.sites.get(("rope_write", path))
        joined = build.fusion("rope_write", path, build.uses[-1][1].page_size)
        if joined is not None and joined.facts is not None:
            build.uses.append(("rope_write", joined.facts))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        return self.rest(self.first(x, step.adapters), step)

    def rest(self, qkv: torch.Tensor, step: Step, activated: bool = False) -> torch.Tensor:
        """The same from the product `[T, q + k + v]` on."""
        if self._rope_write is not None:
            q = self._rope_write(qkv, *step.ropes[self.rope_index], *self._pages, step.groups[self._group].slots)
            out = self.attend_stored(q, step, self._sinks, self._slopes)
            return self._out((out if self._scales is None else out * self._scales[1]).flatten(1), step.adapters)
        q, k, v, *gate = qkv.split(self._sizes, dim=-1)
        if self.spec.clip is not None:
            q, k, v = (t.clamp(-self.spec.clip, self.spec.clip) for t in (q, k, v))
        q, k = self._position(q, k, step)
        out = self._attended(q, k, v.unflatten(-1, (self._kv_heads, -1)), step).flatten(1)
        if self.spec.v_scale != 1.0:
            out = out * self.spec.v_scale  # as good as v's own, and the cache holds v as it was projected
        return self._out(out * torch.sigmoid(gate[0]) if gate else out, step.adapters)

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step) -> torch.Tensor:
        """Where the checkpoint has scales, pages hold k and v divided by them: q takes up the one, the result the other."""
        if self._scales is None:
            return self.attend(q, k, v, step, self._sinks, self._slopes, self._bias)
        of_k, of_v = self._scales
        return self.attend(q * of_k, k / of_k, v / of_v, step, self._sinks, self._slopes, self._bias) * of_v

    def bind(self, table: KernelTable, pages: LayerPages | None, group: int, page_size: int, planner: int) -> None:
        super().bind(table, pages, group, page_size, planner)
        self._rope_write = self._joined(table, page_size)

    def _joined(self, table: KernelTable, page_size: int) -> Callable[..., torch.Tensor] | None:
        """Norms of heads, rotation and cache write as one kernel, where fusion found just these and a kernel does them."""
        facts = self._site.on(table, page_size).facts if self._site is not None else None
        if facts is None:
            return None
        if self._scales is not None:
            facts = replace(facts, k_scale=self._scales[0], v_scale=self._scales[1])
        kernel = table.resolve("rope_write", facts)
        norms = {"q_norm": self._q_norm, "k_norm": self._k_norm} if self.spec.qk_norm else {}
        packed = kernel.pack({name: block.weight for name, block in norms.items()})
        return partial(kernel.run, packed)

    def _position(self, q: torch.Tensor, k: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        if self._q_norm is not None and not self._norm_last:
            q, k = self._q_norm(q), self._k_norm(k)
        q, k = q.unflatten(-1, (self._heads, -1)), k.unflatten(-1, (self._kv_heads, -1))
        if self._rope is not None:
            q, k = self._rope(q, k, *step.ropes[self.rope_index])
        if self._q_norm is not None and self._norm_last:
            q = self._q_norm(q.flatten(1)).unflatten(-1, (self._heads, -1))
            k = self._k_norm(k.flatten(1)).unflatten(-1, (self._kv_heads, -1))
        return (q if self.spec.temper is None else _tempered(q, step.positions, self.spec.temper)), k

    def _norms(self, build: Builder, path: str, heads: Span, kv: Span) -> tuple[Any, Any]:
        spec, dim = self.spec.qk_norm, self.spec.head_dim
        _check_full_norm(path, spec, self.spec.kv_heads, build.shard.world)
        if spec is None:
            return None, None
        self._norm_last = spec.after_rope
        q = _part_norm(build, f"{path}.q_norm", spec, self.spec.heads, heads, dim)
        return q, _part_norm(build, f"{path}.k_norm", spec, self.spec.kv_heads, kv, dim)

    def _facts(self, build: Builder) -> AttentionFacts:
        window, chunk = _windows(self.spec)
        return AttentionFacts(
            dtype=build.numerics.dtype,
            kv_dtype=build.numerics.kv_dtype,
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=self.spec.head_dim,
            v_dim=self.spec.value_dim,
            page_size=16,
            scale=self.spec.scale,
            window=window,
            chunk=chunk,
            softcap=self.spec.softcap,
            sinks=self.spec.sinks,
            alibi=isinstance(self.spec.position, Alibi),
            bias=isinstance(self.spec.position, Distances),
            coarse=build.coarse,
        )

    def _cache(self, build: Builder) -> LayerCache:
        kinds = {None: CacheKind.FULL, "sliding": CacheKind.SLIDING, "chunked": CacheKind.CHUNKED}
        window = self.spec.window
        kind = kinds[window.kind if window else None]
        dtype = build.numerics.kv_dtype
        dim, values = (stored_dim(size, dtype) for size in (self.spec.head_dim, self.spec.value_dim))
        return LayerCache(kind, self._kv_heads, dim, values, dtype, window.size if window else None)

    def _distances(self, build: Builder, path: str, heads: Span) -> torch.Tensor | None:
        distances = self.spec.position
        if not isinstance(distances, Distances):
            return None
        place = path if distances.own else path.rpartition("layers.")[0].rstrip(".")
        shape = (Span.whole(distances.buckets), heads)
        table = build.tensor(f"{place}.distances".lstrip("."), shape, "heads", "float32")
        return None if table is None else self._bias_of(distances, table)

    def _bias_of(self, distances: Distances, table: torch.Tensor) -> torch.Tensor:
        return backward_bias(distances, table)

    def _rope_kernel(self, build: Builder) -> Any:
        if not isinstance(self.spec.position, Rope):
            return None
        kernel = build.kernel(
            "rope", RopeFacts(build.numerics.dtype, self.spec.head_dim, self.spec.position.dims, self.spec.position.style)
        )
        return kernel.run if build.loading else None


class _HeadNorm:
    """Norms each head of `[T, heads · dim]`; `weights` `[heads, dim]`, plus `offset`, where heads have their own."""

    def __init__(self, norm: NormBlock, head_dim: int, weights: torch.Tensor | None, offset: float) -> None:
        self._norm, self._head_dim, self._weights, self._offset = norm, head_dim, weights, offset

    @property
    def weight(self) -> torch.Tensor:
        """The one that all heads share."""
        return self._norm.tensors["weight"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._norm(x.unflatten(-1, (-1, self._head_dim)))
        if self._weights is not None:
            normed = normed * (self._weights + self._offset if self._offset else self._weights)
        return normed.flatten(1)


class _FullNorm:
    """Norms the full width of all ranks' heads, which they gather first: the statistic spans them."""

    def __init__(self, norm: NormBlock, shard: Shard, communicator: Communicator | None) -> None:
        self._norm, self._shard, self._communicator = norm, shard, communicator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._communicator is None:
            return self._norm(x)
        gathered = self._communicator.all_gather(x.contiguous(), dim=-1)
        return self._norm(gathered).chunk(self._shard.world, dim=-1)[self._shard.rank]


def _tempered(q: torch.Tensor, positions: torch.Tensor, temper: Temper) -> torch.Tensor:
    steps = torch.floor((positions.float() + temper.offset) / temper.every)
    return q * (1.0 + temper.beta * torch.log1p(steps))[:, None, None].to(q.dtype)


def _part_norm(build: Builder, path: str, spec: QkNorm, total: int, heads: Span, head_dim: int) -> _HeadNorm | _FullNorm:
    if spec.extent == "full":
        norm = build.norm(path, spec.norm, total * head_dim)
        assert norm is not None
        return _FullNorm(norm, build.shard, build.communicator)
    own = spec.extent == "each"
    norm = build.norm(path, replace(spec.norm, weight=False) if own else spec.norm, head_dim)
    assert norm is not None
    weights = build.tensor(f"{path}.weight", (heads, Span.whole(head_dim)), "heads") if own else None
    return _HeadNorm(norm, head_dim, weights, spec.norm.offset)


def _check_full_norm(path: str, spec: QkNorm | None, kv_heads: int, world: int) -> None:
    if spec is not None and spec.extent == "full" and world > kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={world} exceeds {kv_heads} KV heads whose norm ({path}) spans them all; use at most {kv_heads}"
        )


def _windows(spec: Attention) -> tuple[int | None, int | None]:
    if spec.window is None:
        return None, None
    return (spec.window.size, None) if spec.window.kind == "sliding" else (None, spec.window.size)


def _slopes(spec: Attention, heads: Span, build: Builder) -> torch.Tensor | None:
    if not isinstance(spec.position, Alibi) or not build.loading:
        return None
    slopes = torch.tensor(alibi_slopes(spec.heads, spec.position.max_bias)[heads.index], dtype=torch.float32)
    return (slopes * spec.position.scale).to(build.torch_device)


def alibi_slopes(heads: int, max_bias: float = 8.0) -> Sequence[float]:
    """A slope per head: powers of 2^(−max_bias / n), n the power of two at or above; when heads < n, every second first."""
    n = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-max_bias * (i + 1) / n) for i in range(n)]
    return slopes if n == heads else (slopes[1::2] + slopes[::2])[:heads]
