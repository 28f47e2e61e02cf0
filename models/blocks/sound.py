"""From sound to an encoder's first hidden states: convolutions over time, then positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from pagoda.models.blocks.positions import position_table
from pagoda.models.builder import Builder
from pagoda.models.encoding import EncoderBatch
from pagoda.models.parallel.shard import Span
from pagoda.models.sound import Sound, TimeConv

Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: Mapping[str, Activation] = {"gelu": F.gelu, "tanh": torch.tanh, "glu": lambda x: F.glu(x, dim=0)}


class TimeConvBlock:
    """One convolution, the same on every rank."""

    def __init__(self, build: Builder, path: str, spec: TimeConv, before: int) -> None:
        self._spec = spec
        shape = (spec.width, before, spec.kernel)
        self._weight = build.tensor(f"{path}.weight", tuple(map(Span.whole, shape)), "replicated")
        out = (Span.whole(spec.width),)
        self._bias = build.tensor(f"{path}.bias", out, "replicated") if spec.bias else None
        self._norm = [build.tensor(f"{path}.norm.{name}", out, "replicated") for name in ("weight", "bias")] if spec.normed else []
        self.width = spec.width // 2 if spec.activation == "glu" else spec.width

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x `[before, frames]` → `[width, fewer frames]`."""
        assert self._weight is not None
        x = F.conv1d(x.to(self._weight.dtype), self._weight, self._bias, stride=self._spec.stride, padding=self._spec.padding)
        x = ACTIVATIONS[self._spec.activation](x)
        return F.group_norm(x[None], 1, *self._norm)[0] if self._norm else x


class SoundBlock:
    """One input at a time, since their lengths differ."""

    def __init__(self, build: Builder, path: str, spec: Sound, width: int) -> None:
        self._spec, self._convs, before = spec, list[TimeConvBlock](), spec.bins or 1
        for index, conv in enumerate(spec.convs):
            self._convs.append(TimeConvBlock(build, f"{path}.{index}", conv, before))
            before = self._convs[-1].width
        self._offset = spec.positions.offset if spec.positions else 0
        self._positions = position_table(build, f"{path}.positions", spec.positions, width)

    def __call__(self, batch: EncoderBatch) -> torch.Tensor:
        """`[T, width]` of all inputs, one after another."""
        x = torch.cat([self._one(features) for features in batch.features])
        if self._spec.scale != 1.0:
            x = x * self._spec.scale
        return x if self._positions is None else x + F.embedding(batch.positions + self._offset, self._positions)

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(self._spec.bins or 1, -1)
        for conv in self._convs:
            x = conv(x)
        return x.t()
