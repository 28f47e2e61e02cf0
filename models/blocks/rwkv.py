"""RWKV's two mixers on one rank: channels are split. Blends with the token before are convolutions of two taps over copies of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pagoda.hal.kv import StatePart
from pagoda.models.blocks.linear import Linear
from pagoda.models.blocks.mamba import negative_exp
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.state import StateMixer
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.recurrent import ChannelMix, TimeMix
from pagoda.ops.conv import ConvFacts
from pagoda.ops.state import StateBatch
from pagoda.ops.wkv import WkvFacts


class Blends:
    """Of each token with the one before it, in the shares that `names` have of it: `{path}.blend_{name}` `[1, 1, width]`."""

    def __init__(self, build: Builder, path: str, names: Sequence[str], width: int) -> None:
        self._count, one = len(names), Span.whole(1)
        shares = [build.tensor(f"{path}.blend_{name}", (one, one, Span.whole(width)), "replicated") for name in names]
        kernel = build.kernel("causal_conv1d", ConvFacts(build.numerics.dtype, self._count * width, 2, activation="none"))
        self.part = StatePart((self._count * width, 1), build.numerics.dtype)
        if build.loading:
            self._run, self._packed = kernel.run, build.pack(kernel, lambda: _taps(shares))  # type: ignore[arg-type]

    def __call__(self, x: torch.Tensor, pages: torch.Tensor, batch: StateBatch) -> list[torch.Tensor]:
        """x `[T, width]` → as many of the same shape as there are names."""
        blended = self._run(self._packed, x.repeat(1, self._count), pages, batch)
        return [each.contiguous() for each in blended.chunk(self._count, dim=-1)]


def _taps(shares: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    share = torch.cat([each.flatten() for each in shares])
    return {"weight": torch.stack([1 - share, share], dim=-1)}


class TimeMixBlock(StateMixer):
    """One layer's averages over time."""

    def __init__(self, build: Builder, path: str, spec: TimeMix, width: int) -> None:
        self.spec = spec
        own, whole = build.shard.split(spec.inner, "channels of the averages"), Span.whole(width)
        self._blends = Blends(build, path, ("key", "value", "gate"), width)
        self._linears = [build.linear(path, {name: own}, whole, "column") for name in ("key", "value", "gate")]
        self._decay = build.tensor(f"{path}.decay", (own,), "heads", "float32", negative_exp)
        self._first = build.tensor(f"{path}.first", (own,), "heads", "float32")
        self._out = build.linear(path, {"out": whole}, own, "row")
        kernel = build.kernel("wkv", WkvFacts(build.numerics.dtype, len(own)))
        self._wkv: Any = kernel.run if build.loading else None
        super().__init__(self._blends.part, StatePart((3, len(own)), "float32"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (before, sums), batch = self.state(step)
        blends = self._blends(x, before, batch)
        k, v, gate = (linear(each, step.adapters) for linear, each in zip(self._linears, blends, strict=True))
        return self._out(self._wkv(k, v, self._decay, self._first, sums, batch) * torch.sigmoid(gate), step.adapters)


class ChannelMixBlock(StateMixer):
    """One layer's feed-forward. The gate is over the layer's width, and multiplies what the ranks have not summed yet."""

    def __init__(self, build: Builder, path: str, spec: ChannelMix, width: int) -> None:
        self.spec = spec
        own, whole = build.shard.split(spec.hidden, "channels of the feed-forward"), Span.whole(width)
        self._blends = Blends(build, path, ("up", "gate"), width)
        self._up: Linear | Any = build.linear(path, {"up": own}, whole, "column")
        self._gate: Linear | Any = build.linear(path, {"gate": whole}, whole, "replicated")
        self._down: Linear | Any = build.linear(path, {"down": whole}, own, "row")
        super().__init__(self._blends.part)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (before,), batch = self.state(step)
        up, gate = self._blends(x, before, batch)
        hidden = torch.relu(self._up(up, step.adapters)).square()
        return self._down(hidden, step.adapters) * torch.sigmoid(self._gate(gate, step.adapters))
