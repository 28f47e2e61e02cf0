"""A block of attention and feed-forward that several layers share, each with low-rank additions of its own, before a recurrent mixer."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from pagoda.models.blocks.attention import AttentionBlock
from pagoda.models.blocks.feed_forward import MlpBlock
from pagoda.models.blocks.paged import Step
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span, summed
from pagoda.models.spec import Shared


class SharedBlock:
    """One layer's use of it on one rank. Weights of the block are held once; pages are each layer's own."""

    def __init__(self, build: Builder, path: str, spec: Shared, width: int, recurrent: Callable[..., Any]) -> None:
        at, whole, rank = f"shared.{spec.block}", Span.whole(width), Span.whole(spec.rank)
        known = build.shared.get(at)
        if known is None:
            attention = AttentionBlock(build, f"{at}.attention", spec.attention, 2 * width, width)
            norms = build.norm(f"{at}.norm", spec.norm, 2 * width), build.norm(f"{at}.ff_norm", spec.norm, width)
            build.shared[at] = known = (attention, MlpBlock(build, f"{at}.ff", spec.feed_forward, width), *norms)
            self.attention = attention
        else:
            self.attention = copy(known[0])
            self.attention.begin(build, f"{path}.attention")
        _, self._ff, self._norm, self._ff_norm = known
        heads, kv = build.shard.split(spec.attention.heads, "attention heads"), build.shard.kv_heads(spec.attention.kv_heads)
        sizes = {"q": heads, "k": kv, "v": kv} if spec.adapted else {}
        self._adds = [self._low_rank(build, path, (n,), s.times(spec.attention.head_dim), rank, 2 * width) for n, s in sizes.items()]
        hidden = build.shard.split(spec.feed_forward.hidden, "hidden numbers of the feed-forward")
        self._ff_add = self._low_rank(build, path, ("gate", "up"), hidden, rank, width)
        self._into = build.linear(path, {"into": whole}, whole, "replicated")
        self._inner = build.norm(f"{path}.inner", spec.norm, width)
        self.recurrent = recurrent(build, f"{path}.recurrent", spec.recurrent, width)
        self._communicator = build.communicator

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]`, the stream itself → this rank's share of the output `[T, width]`, to be summed over ranks."""
        assert step.embedded is not None
        wide = self._norm(torch.cat([x, step.embedded], dim=-1))
        qkv = self.attention.first(wide, step.adapters)
        if self._adds:
            qkv = qkv + torch.cat([add(wide, step) for add in self._adds], dim=-1)
        y = self._ff_norm(summed(self.attention.rest(qkv, step), self._communicator))
        y = summed(self._ff.rest(self._ff.first(y, step.adapters) + self._ff_add(y, step), step), self._communicator)
        return self.recurrent(self._inner(x + self._into(y, step.adapters)), step)  # type: ignore[no-any-return]

    @staticmethod
    def _low_rank(
        build: Builder, path: str, names: tuple[str, ...], rows: Span, rank: Span, width: int
    ) -> Callable[[torch.Tensor, Step], torch.Tensor]:
        down = build.linear(path, {f"{names[0]}_down": rank}, Span.whole(width), "replicated")
        up = build.linear(path, dict.fromkeys((f"{name}_add" for name in names), rows), rank, "column")
        return lambda x, step: up(down(x, step.adapters), step.adapters)
