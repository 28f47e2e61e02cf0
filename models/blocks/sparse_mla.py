"""Latent attention over keys that small heads choose (arXiv:2512.02556): their one key a token lies in the pages beside the latent.

While no context of a step is longer than what a query may see, all keys are chosen, and attention is as without a choice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from pagoda.hal.errors import ConfigError
from pagoda.hal.kv import LayerCache, LayerPages
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.mla import MlaBlock
from pagoda.models.blocks.paged import Step
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.spec import MLA, Index, Norm
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.rope import RopeFacts
from pagoda.ops.sparse_attention import ChooseFacts, SparseAttentionFacts

KEY_NORM = Norm("layer", 1e-6, bias=True)
"""Of the small heads' key."""


class IndexBlock:
    """The small heads, the same on every rank."""

    def __init__(self, build: Builder, path: str, spec: MLA, index: Index, width: int) -> None:
        if spec.q_rank is None or spec.position is None:
            raise ConfigError(
                f"{path}: what chooses keys reads the query's latent and turns, and the configuration has no latent or rotation"
            )
        key = Span.whole(index.dim)
        self._sizes = [index.dim, index.heads]
        self._q: Any = build.linear(path, {"index_q": key.times(index.heads)}, Span.whole(spec.q_rank), "replicated")
        self._k: Any = build.linear(path, {"index_k": key, "index_weights": Span.whole(index.heads)}, Span.whole(width), "replicated")
        self._norm: Any = build.norm(f"{path}.index_norm", KEY_NORM, index.dim)
        rope = build.kernel("rope", RopeFacts(build.numerics.dtype, index.dim, spec.position.dims, index.style))
        self._rope: Any = rope.run if build.loading else None

    def __call__(
        self, x: torch.Tensor, q_latent: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], adapters: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x `[T, width]`, q_latent `[T, q_rank]` → q `[T, H, D]`, the heads' weights `[T, H]`, and the key `[T, 1, D]`."""
        k, weights = self._k(x, adapters).split(self._sizes, dim=-1)
        q = self._q(q_latent, adapters).unflatten(-1, (self._sizes[1], -1))
        q, k = self._rope(q, self._norm(k.contiguous()).unsqueeze(1), *turn)
        return q, weights, k


class SparseMlaBlock(MlaBlock):
    """One layer on one rank."""

    def __init__(self, build: Builder, path: str, spec: MLA, width: int) -> None:
        assert spec.index is not None
        self._top_k, self._stored_dim = spec.index.top_k, spec.index.dim if spec.index.own else 0
        self._index = IndexBlock(build, path, spec, spec.index, width) if spec.index.own else None
        super().__init__(build, path, spec, width)
        if not self._absorbs:
            raise ConfigError("sparse attention keeps latents, which neither adapters nor a KV cache in int8 go with; leave both out")
        build.uses += [(op, facts) for op, facts in self._choices(build.uses[-1][1].page_size).items()]  # type: ignore[attr-defined]

    def bind(self, table: KernelTable, pages: LayerPages | None, group: int, page_size: int, planner: int) -> None:
        super().bind(table, pages, group, page_size, planner)
        self._choose, self._attend_chosen = (table.resolve(op, facts).run for op, facts in self._choices(page_size).items())

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor], step: Step) -> torch.Tensor:
        batch, beside = step.groups[self._group], k[..., :0]
        if self._index is not None:
            small, weights, beside = self._index(*inputs, step.ropes[self.rope_index], step.adapters)
        self._write(k, beside, *self._stored, batch.slots)
        if batch.max_seq <= self._top_k:
            return self.attend_stored(q, step)
        if batch.tree is not None:
            raise ConfigError("drafts that branch do not go with sparse attention; ask for a method whose drafts are chains")
        if self._index is not None:
            step.chosen = self._choose(small, weights, self._stored.v, batch)
        return self._attend_chosen(q, self._stored.k, step.chosen, batch)

    def _cached(self, build: Builder) -> tuple[AttentionFacts, LayerCache]:
        facts, cache = super()._cached(build)
        return facts, replace(cache, v_dim=self._stored_dim) if self._absorbs else cache

    def _written(self, facts: AttentionFacts) -> AttentionFacts:
        return replace(super()._written(facts), v_dim=self._stored_dim)

    def _choices(self, page_size: int) -> dict[str, ChooseFacts | SparseAttentionFacts]:
        own, index = self.facts, self.spec.index
        assert index is not None
        choose = ChooseFacts(own.dtype, own.kv_dtype, index.heads, index.dim, page_size, index.top_k)
        attend = SparseAttentionFacts(
            own.dtype, own.kv_dtype, own.num_heads, own.head_dim, own.v_dim, page_size, own.scale, index.top_k
        )  # fmt: skip
        return {"choose_keys": choose, "sparse_attention": attend}
