"""The gated short convolution of LFM 2 on one rank: channels are split."""

from __future__ import annotations

import torch
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.state import ConvBlock, StateMixer
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.recurrent import ShortConv


class ShortConvBlock(StateMixer):
    """One layer's `out(c · conv(b · x))`."""

    def __init__(self, build: Builder, path: str, spec: ShortConv, width: int) -> None:
        self.spec = spec
        own, whole = build.shard.split(width, "channels of the short convolution"), Span.whole(width)
        self._in = build.linear(path, {"b": own, "c": own, "x": own}, whole, "column", spec.bias)
        self._conv = ConvBlock(build, f"{path}.conv", spec.conv, {"x": own}, "none")
        self._out = build.linear(path, {"out": whole}, own, "row", spec.bias)
        super().__init__(self._conv.part)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (inputs,), batch = self.state(step)
        b, c, x = self._in(x, step.adapters).chunk(3, dim=-1)
        return self._out(c * self._conv(b * x, inputs, batch), step.adapters)
