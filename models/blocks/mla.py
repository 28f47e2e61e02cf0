"""Multi-head latent attention (arXiv:2405.04434), absorbed: the cache holds a token's latent and its rotated key, once for all heads.

K and V of a head are the latent times the head's part of `kv`. Instead, the query is multiplied by the K half of it and the result by the
V half, so that attention is over one KV head of `kv_rank + rope_dim` numbers, whose first `kv_rank` are the values too: of DeepSeek V2
Lite a ninth of what K and V of all heads would take. Where adapters may change `kv`, or a cache in int8 keeps a scale behind each head's
numbers, K and V of every head are made and stored, as the equations have it.
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
from pagoda.ops.head_gemm import HeadGemmFacts
from pagoda.ops.rope import RopeFacts


class MlaBlock(PagedMixer):
    """One layer's latent attention on one rank: heads are split, the ways down to the latents are on every rank."""

    def __init__(self, build: Builder, path: str, spec: MLA, width: int) -> None:
        self.spec = spec
        heads, whole = build.shard.split(spec.heads, "attention heads"), Span.whole(width)
        self._heads = len(heads)
        self._make_query(build, path, heads, whole)
        self._kv_norm: Any = build.norm(f"{path}.kv_norm", spec.norm, spec.kv_rank)
        self._absorbs = build.lora is None and build.numerics.kv_dtype != "int8"
        self._make_kv(build, path, heads)
        self._out = build.linear(path, {"o": whole}, heads.times(spec.v_dim), "row", spec.out_bias)
        self._rope = self._rope_kernel(build)
        super().__init__(build, *self._cached(build))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        spec = self.spec
        q_latent, latent, k_rope = self._down(x, step.adapters)
        q = self._q(q_latent, step.adapters)
        q_nope, q_rope = q.unflatten(-1, (self._heads, -1)).split([spec.nope_dim, spec.rope_dim], dim=-1)
        k_rope = k_rope.unsqueeze(1)
        if self._rope is not None:
            q_rope, k_rope = self._rope(q_rope.contiguous(), k_rope.contiguous(), *step.ropes[self.rope_index])
        if self._absorbs:
            k = torch.cat([self._kv_norm(latent.contiguous()).unsqueeze(1), k_rope], dim=-1)
            mixed = self._mixed(torch.cat([self._to_latent(q_nope), q_rope], dim=-1), k, (x, q_latent), step)
            return self._out(self._from_latent(mixed).flatten(1), step.adapters)
        kv = self._kv(self._kv_norm(latent.contiguous()), step.adapters).unflatten(-1, (self._heads, -1))
        k_nope, v = kv.split([spec.nope_dim, spec.v_dim], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, self._heads, -1)], dim=-1)
        return self._out(self.attend(torch.cat([q_nope, q_rope], dim=-1), k, v.contiguous(), step).flatten(1), step.adapters)

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor], step: Step) -> torch.Tensor:
        """q `[T, H, D]` over the latents, after k `[T, 1, D]` is stored → `[T, H, kv_rank]`; `inputs`: x, and its queries' latents."""
        return self.attend(q, k, k[..., :0], step)

    def _make_kv(self, build: Builder, path: str, heads: Span) -> None:
        """The way from the latent to K and V, or from the query to the latent and from there to the result."""
        spec, sizes, rank = self.spec, [self.spec.nope_dim, self.spec.v_dim], Span.whole(self.spec.kv_rank)
        if not self._absorbs:
            self._kv: Any = build.linear(path, {"kv": heads.times(sum(sizes))}, rank, "column")
            return

        def half(which: int, inner: int, outer: int) -> Any:
            def pick(weight: torch.Tensor) -> torch.Tensor:
                part = weight.unflatten(0, (self._heads, -1)).split(sizes, dim=1)[which]
                return (part if which else part.transpose(1, 2)).contiguous()

            facts = HeadGemmFacts(build.numerics.dtype, self._heads, inner, outer)
            return build.head_product(f"{path}.kv", facts, heads.times(sum(sizes)), rank, pick)

        self._to_latent = half(0, spec.nope_dim, spec.kv_rank)
        self._from_latent = half(1, spec.kv_rank, spec.v_dim)

    def _cached(self, build: Builder) -> tuple[AttentionFacts, LayerCache]:
        """Facts of the attention primitive, and what a page holds for it."""
        spec, numerics = self.spec, build.numerics
        dtype, kv_dtype = numerics.dtype, numerics.kv_dtype
        if self._absorbs:
            dim = spec.kv_rank + spec.rope_dim
            facts = AttentionFacts(dtype, kv_dtype, self._heads, 1, dim, spec.kv_rank, page_size=16, scale=spec.scale, latent=True)
            return facts, LayerCache(CacheKind.LATENT, 1, dim, 0, kv_dtype)
        dim = spec.nope_dim + spec.rope_dim
        facts = AttentionFacts(dtype, kv_dtype, self._heads, self._heads, dim, spec.v_dim, page_size=16, scale=spec.scale)
        stored = (stored_dim(size, kv_dtype) for size in (dim, spec.v_dim))
        return facts, LayerCache(CacheKind.FULL, self._heads, *stored, kv_dtype)

    def _down(self, x: torch.Tensor, adapters: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the query is made of, the latent and the rotated key."""
        sizes = [self.spec.kv_rank, self.spec.rope_dim]
        if self.spec.q_rank is None:
            return x, *self._latents(x, adapters).split(sizes, dim=-1)
        q, latent, k_rope = self._latents(x, adapters).split([self.spec.q_rank, *sizes], dim=-1)
        return self._q_norm(q.contiguous()), latent, k_rope

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
