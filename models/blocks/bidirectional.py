"""Attention of a prompt over all of itself: the projections of `AttentionBlock`, and no cache."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.hal.kv import LayerPages
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.attention import AttentionBlock
from pagoda.models.blocks.paged import Step
from pagoda.models.builder import Builder
from pagoda.models.distance import Distances, distance_bias
from pagoda.models.spec import Bidirectional
from pagoda.ops.segment_attention import SegmentAttentionFacts


class BidirectionalBlock(AttentionBlock):
    """One layer on one rank. Steps hold whole prompts (`Step.segments`)."""

    cache = None  # type: ignore[assignment]
    kernel = None

    def __init__(self, build: Builder, path: str, spec: Bidirectional, width: int) -> None:
        super().__init__(build, path, spec.attention, width)

    def _bias_of(self, distances: Distances, table: torch.Tensor) -> torch.Tensor:
        return distance_bias(distances, table)

    def begin(self, build: Builder, path: str) -> None:
        window = self.spec.window.size if self.spec.window is not None else None
        facts = SegmentAttentionFacts(
            build.numerics.dtype,
            self._heads,
            self._kv_heads,
            self.spec.head_dim,
            self.spec.scale,
            window,
            isinstance(self.spec.position, Distances),
        )
        kernel: Any = build.kernel("segment_attention", facts)
        self._run = kernel.run if build.loading else None

    def page_sizes(self, table: KernelTable) -> tuple[int, ...]:
        """Any: it has no pages."""
        return table.info.limits.page_sizes

    def bind(self, table: KernelTable, pages: LayerPages | None, group: int, page_size: int, planner: int) -> None:
        """Nothing to bind."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Step,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """q `[T, H, D]` over the step's own k and v `[T, Hk, D]` → `[T, H, D]`."""
        assert step.segments is not None and self._run is not None
        result: torch.Tensor = self._run(q, k, v, step.segments, bias)
        return result
