"""Multi-head latent attention (arXiv:2405.04434) in its expanded form: K and V of every head are made from the latent and stored.

The cache holds K = [nope, rope] and V of each head, so any kernel of `paged_attention` runs it; a page is larger than one of latents
would be by heads · (nope + rope + v) / (kv_rank + rope).
"""

from __future__ import annotations

from typing import Any

import torch
from pagoda.hal.kv import CacheKind, LayerCache, stored_dim
from pagoda.models.blocks.paged import PagedMixer, Step
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.spec import MLA
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.rope import RopeFacts


class MlaBlock(PagedMixer):
    """One layer's latent attention on one rank: heads are split, the ways down to the latents are on every rank."""

    def __init__(self, build: Builder, path: str, spec: MLA, width: int) -> None:
        self.spec = spec
        heads, whole = build.shard.split(spec.heads, "attention heads"), Span.whole(width)
        self._heads = len(heads)
        self._make_query(build, path, heads, whole)
        self._kv_norm: Any = build.norm(f"{path}.kv_norm", spec.norm, spec.kv_rank)
        self._kv = build.linear(path, {"kv": heads.times(spec.nope_dim + spec.v_dim)}, Span.whole(spec.kv_rank), "column")
        self._out = build.linear(path, {"o": whole}, heads.times(spec.v_dim), "row", spec.out_bias)
        self._rope = self._rope_kernel(build)
        numerics, dim = build.numerics, spec.nope_dim + spec.rope_dim
        facts = AttentionFacts(numerics.dtype, numerics.kv_dtype, self._heads, self._heads, dim, spec.v_dim, page_size=16, scale=spec.scale)
        stored = (stored_dim(size, numerics.kv_dtype) for size in (dim, spec.v_dim))
        super().__init__(build, facts, LayerCache(CacheKind.FULL, self._heads, *stored, numerics.kv_dtype))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        spec = self.spec
        q, latent, k_rope = self._down(x, step.adapters)
        q_nope, q_rope = q.unflatten(-1, (self._heads, -1)).split([spec.nope_dim, spec.rope_dim], dim=-1)
        k_rope = k_rope.unsqueeze(1)
        if self._rope is not None:
            q_rope, k_rope = self._rope(q_rope.contiguous(), k_rope.contiguous(), *step.ropes[self.rope_index])
        kv = self._kv(self._kv_norm(latent.contiguous()), step.adapters).unflatten(-1, (self._heads, -1))
        k_nope, v = kv.split([spec.nope_dim, spec.v_dim], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self._heads, -1)], dim=-1)
        return self._out(self.attend(torch.cat([q_nope, q_rope], dim=-1), k, v.contiguous(), step).flatten(1), step.adapters)

    def _down(self, x: torch.Tensor, adapters: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = [self.spec.kv_rank, self.spec.rope_dim]
        if self.spec.q_rank is None:
            return self._q(x, adapters), *self._latents(x, adapters).split(sizes, dim=-1)
        q, latent, k_rope = self._latents(x, adapters).split([self.spec.q_rank, *sizes], dim=-1)
        return self._q(self._q_norm(q.contiguous()), adapters), latent, k_rope

    def _make_query(self, build: Builder, path: str, heads: Span, whole: Span) -> None:
        spec = self.spec
        q, kv_down = heads.times(spec.nope_dim + spec.rope_dim), Span.whole(spec.kv_rank + spec.rope_dim)
        down = {"kv_down": kv_down} if spec.q_rank is None else {"q_down": Span.whole(spec.q_rank), "kv_down": kv_down}
        self._latents = build.linear(path, down, whole, "replicated", spec.down_bias)
        self._q_norm: Any = build.norm(f"{path}.q_norm", spec.norm, spec.q_rank) if spec.q_rank else None
        self._q = build.linear(path, {"q": q}, Span.whole(spec.q_rank) if spec.q_rank else whole, "column")

    def _rope_kernel(self, build: Builder) -> Any:
        if self.spec.position is None:
            return None
        dims = self.spec.rope_dim
        kernel = build.kernel("rope", RopeFacts(build.numerics.dtype, dims, self.spec.position.dims, self.spec.position.style))
        return kernel.run if build.loading else None
