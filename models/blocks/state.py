"""What every recurrent mixer shares: its state's pages, a step's view of them, the convolution before, the gated norm after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pagoda.hal.comm import Communicator
from pagoda.hal.kv import LayerCache, StatePages, StatePart
from pagoda.hal.table import KernelTable
from pagoda.models.blocks.paged import Step
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Shard, Span
from pagoda.models.recurrent import Conv, GatedNorm
from pagoda.ops.conv import ConvFacts
from pagoda.ops.norm import GatedNormFacts
from pagoda.ops.state import StateBatch


class StateMixer:
    """One layer's recurrent state on one rank.

    Attributes:
        cache: the parts of its state. kernel: None, nothing is planned on the host.
    """

    kernel: ClassVar[None] = None
    _pages: StatePages

    def __init__(self, *parts: StatePart) -> None:
        self.cache = LayerCache.of_state(*parts)

    def page_sizes(self, table: KernelTable) -> tuple[int, ...]:
        """Any number of tokens suits a state."""
        return table.info.limits.page_sizes

    def bind(self, table: KernelTable, pages: StatePages | None, group: int, page_size: int, planner: int) -> None:
        """Take the pages; nothing depends on the other arguments but the group's index."""
        self._group = group
        if pages is not None:
            self._pages = pages

    def state(self, step: Step) -> tuple[tuple[torch.Tensor, ...], StateBatch]:
        """The parts' pages, and which of them this step reads and writes."""
        return self._pages.parts, step.states(self._group, self._pages.page)


class ConvBlock:
    """The convolution over several projections that lie side by side, each split over ranks by itself."""

    def __init__(self, build: Builder, path: str, spec: Conv, parts: Mapping[str, Span], activation: Any = "silu") -> None:
        channels = sum(len(span) for span in parts.values())
        taps = (Span.whole(1), Span.whole(spec.taps))
        weight = build.stack({f"{path}.{name}.weight": (span, *taps) for name, span in parts.items()}, "heads")
        bias = build.stack({f"{path}.{name}.bias": (span,) for name, span in parts.items()}, "heads") if spec.bias else None
        kernel = build.kernel("causal_conv1d", ConvFacts(build.numerics.dtype, channels, spec.taps, spec.bias, activation))
        # A tap's channels side by side, as those of a token: what threads beside each other read lies together.
        self.part = StatePart((spec.taps - 1, channels), build.numerics.dtype)
        if build.loading:
            assert weight is not None
            self._run = kernel.run
            weights = {"weight": weight.squeeze(1)} | ({"bias": bias} if bias is not None else {})
            self._packed = build.pack(kernel, lambda: weights)

    def __call__(self, x: torch.Tensor, pages: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        """x `[T, channels]` → the same shape."""
        result: torch.Tensor = self._run(self._packed, x, pages.transpose(1, 2), batch)
        return result


class GatedNormBlock:
    """Norm and gate of `[T, width]`, `width` this rank's; where a group spans ranks, they gather first."""

    def __init__(self, build: Builder, path: str, spec: GatedNorm, own: Span) -> None:
        size, norm = own.total // spec.groups, spec.norm
        assert norm.kind == "rms" and norm.offset == 0.0, f"{path}: gated norms are plain RMS norms"
        gathers = spec.groups % build.shard.world != 0
        self._communicator: Communicator | None = build.communicator if gathers else None
        self._shard: Shard = build.shard
        groups = spec.groups if gathers else len(own) // size
        whole = Span.whole(size if spec.shared else own.total)
        weight = build.tensor(f"{path}.weight", *(((whole,), "replicated") if spec.shared or gathers else ((own,), "heads")))
        facts = GatedNormFacts(build.numerics.dtype, size, groups, norm.eps, spec.gate, spec.gate_first, "shared" if spec.shared else "own")
        kernel = build.kernel("gated_norm", facts)
        if build.loading:
            self._run: Any = kernel.run
            self._packed = kernel.pack({"weight": weight})

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._communicator is None:
            return self._run(self._packed, x, gate)
        x, gate = self._communicator.all_gather(torch.stack([x, gate]), dim=-1)
        return self._run(self._packed, x, gate).chunk(self._shard.world, dim=-1)[self._shard.rank]
