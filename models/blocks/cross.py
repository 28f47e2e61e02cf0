"""Attention over what an encoder gave: its K and V are written once for a request, then read by every token of it."""

from __future__ import annotations

import torch
from pagoda.hal.kv import CacheKind, LayerCache
from pagoda.models.blocks.paged import PagedMixer, Step
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.spec import Cross
from pagoda.ops.attention import AttentionFacts


class CrossBlock(PagedMixer):
    """One layer on one rank."""

    def __init__(self, build: Builder, path: str, spec: Cross, width: int) -> None:
        self.spec = own = spec.attention
        numerics = build.numerics
        heads, kv = build.shard.split(own.heads, "attention heads"), build.shard.kv_heads(own.kv_heads)
        self._heads, self._kv_heads = len(heads), len(kv)
        whole, k, v = Span.whole(width), kv.times(own.head_dim), kv.times(own.value_dim)
        self._sizes = [len(k), len(v)]
        self.first = build.linear(path, {"q": heads.times(own.head_dim)}, whole, "column", own.qkv_bias)
        self._kv = build.linear(path, {"k": k, "v": v}, Span.whole(spec.width), "column", own.qkv_bias)
        self._out = build.linear(path, {"o": whole}, heads.times(own.value_dim), "row", own.out_bias)
        facts = AttentionFacts(
            numerics.dtype, numerics.kv_dtype, len(heads), len(kv), own.head_dim, own.value_dim, 16, own.scale,
            softcap=own.softcap, causal=False,
        )  # fmt: skip
        cache = LayerCache(CacheKind.CROSS, len(kv), own.head_dim, own.value_dim, numerics.kv_dtype, longest=spec.longest)
        super().__init__(build, facts, cache)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        return self.rest(self.first(x, step.adapters), step)

    def rest(self, q: torch.Tensor, step: Step, activated: bool = False) -> torch.Tensor:
        """The same from q on."""
        return self._out(self.attend_stored(q.unflatten(-1, (self._heads, -1)), step).flatten(1), step.adapters)

    def store(self, hidden: torch.Tensor, slots: tuple[torch.Tensor | None, ...]) -> None:
        """Write K and V of the encoder's output `[T, its width]` to `slots` of this layer's group."""
        k, v = (part.unflatten(-1, (self._kv_heads, -1)) for part in self._kv(hidden).split(self._sizes, dim=-1))
        self._write(k, v, *self._pages, slots[self._group])
