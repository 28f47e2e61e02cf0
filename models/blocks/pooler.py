"""From pooled hidden states to vectors or scores: the projections and norms of a `Pooler`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pagoda.models.blocks.linear import Linear
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.pooling import Dense, Pooler
from pagoda.models.spec import Norm
from pagoda.ops.activation import ACTIVATIONS


class PoolerBlock:
    """The same on every rank; a few rows a step."""

    def __init__(self, build: Builder, spec: Pooler, width: int) -> None:
        self.spec = spec
        self._dtype = getattr(torch, build.numerics.dtype)
        self._steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for place, step in enumerate(spec.steps):
            if isinstance(step, Dense):
                self._steps.append(DenseBlock(build, place, step, width))
                width = step.outputs
            else:
                norm = build.norm(f"pooler.{place}", Norm("layer", step.eps, bias=step.bias), width)
                assert norm is not None
                self._steps.append(norm)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[S, width]` → `[S, outputs]` float32, neither normalised nor activated."""
        if self._steps:
            hidden = hidden.to(self._dtype)
        for step in self._steps:
            hidden = step(hidden)
        return hidden.float()


class DenseBlock:
    """A projection and its activation."""

    def __init__(self, build: Builder, place: int, spec: Dense, width: int) -> None:
        parts = {str(place): Span.whole(spec.outputs)}
        linear = build.linear("pooler", parts, Span.whole(width), "replicated", spec.bias)
        self._linear: Linear | Callable[[torch.Tensor], torch.Tensor] = linear
        self._act = ACTIVATIONS[spec.activation] if spec.activation is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._linear(x)
        return out if self._act is None else self._act(out)
