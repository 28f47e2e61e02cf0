"""Mamba and Mamba 2 on one rank: channels and heads are split, b and c of a group are on every rank that has heads of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pagoda.hal.kv import StatePart
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.state import ConvBlock, GatedNormBlock, StateMixer
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span, summed
from pagoda.models.recurrent import Selective, Ssd
from pagoda.ops.scan import SelectiveScanFacts, SsdFacts


def negative_exp(x: torch.Tensor) -> torch.Tensor:
    """What checkpoints store as the logarithm of the decay's rate."""
    return -torch.exp(x.float())


class SelectiveBlock(StateMixer):
    """One layer's selective scan (Mamba)."""

    def __init__(self, build: Builder, path: str, spec: Selective, width: int) -> None:
        self.spec = spec
        inner, whole = build.shard.split(spec.inner, "channels of the state space"), Span.whole(width)
        self._inner, self._communicator = len(inner), build.communicator
        self._in = build.linear(path, {"x": inner, "z": inner}, whole, "column", spec.bias)
        self._conv = ConvBlock(build, f"{path}.conv", spec.conv, {"x": inner})
        self._latents = build.linear(path, {"latents": Span.whole(spec.step_rank + 2 * spec.state)}, inner, "row")
        self._norms: tuple[Any, ...] = tuple(
            build.norm(f"{path}.{name}_norm", spec.inner_norm, size)
            for name, size in (("step", spec.step_rank), ("b", spec.state), ("c", spec.state))
        )
        self._step = build.linear(path, {"step": inner}, Span.whole(spec.step_rank), "column", bias=True)
        self._a = build.tensor(f"{path}.a_log", (inner, Span.whole(spec.state)), "heads", "float32", negative_exp)
        self._d = build.tensor(f"{path}.d", (inner,), "heads", "float32")
        self._out = build.linear(path, {"out": whole}, inner, "row", spec.bias)
        kernel = build.kernel("selective_scan", SelectiveScanFacts(build.numerics.dtype, len(inner), spec.state))
        self._scan: Any = kernel.run if build.loading else None
        super().__init__(self._conv.part, StatePart((len(inner), spec.state), "float32"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (inputs, state), batch = self.state(step)
        x, gate = self._in(x, step.adapters).split(self._inner, dim=-1)
        x = self._conv(x, inputs, batch)
        latents = summed(self._latents(x, step.adapters), self._communicator)
        dt, b, c = self._normed(latents.split([self.spec.step_rank, self.spec.state, self.spec.state], dim=-1))
        dt = F.softplus(self._step(dt, step.adapters).float())
        return self._out(self._scan(x, dt, self._a, b, c, self._d, state, batch) * F.silu(gate), step.adapters)

    def _normed(self, latents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        pairs = zip(latents, self._norms, strict=True)
        return tuple(x.contiguous() if norm is None else norm(x.contiguous()) for x, norm in pairs)


class SsdBlock(StateMixer):
    """One layer's structured state space (Mamba 2)."""

    def __init__(self, build: Builder, path: str, spec: Ssd, width: int) -> None:
        self.spec = spec
        heads, groups = build.shard.split(spec.heads, "heads of the state space"), build.shard.kv_heads(spec.groups)
        inner, shared, whole = heads.times(spec.head_dim), groups.times(spec.state), Span.whole(width)
        self._groups = len(groups)
        self._sizes = [len(inner), len(inner) + 2 * len(shared), len(heads)]
        self._conv_sizes = [len(inner), len(shared), len(shared)]
        parts = {"z": inner, "x": inner, "b": shared, "c": shared, "step": heads}
        self._in = build.linear(path, parts, whole, "column", spec.bias)
        self._scales = self._multipliers(build)
        self._conv = ConvBlock(build, f"{path}.conv", spec.conv, {"x": inner, "b": shared, "c": shared})
        self._step_bias = build.tensor(f"{path}.step_bias", (heads,), "heads", "float32")
        self._a = build.tensor(f"{path}.a_log", (heads,), "heads", "float32", negative_exp)
        self._d = build.tensor(f"{path}.d", (heads,), "heads", "float32")
        self._norm = GatedNormBlock(build, f"{path}.norm", spec.norm, inner) if spec.norm else None
        self._out = build.linear(path, {"out": whole}, inner, "row", spec.bias)
        facts = SsdFacts(build.numerics.dtype, len(heads), spec.head_dim, len(groups), spec.state, spec.step_limits)
        kernel = build.kernel("ssd_scan", facts)
        self._scan: Any = kernel.run if build.loading else None
        super().__init__(self._conv.part, StatePart((len(heads), spec.head_dim, spec.state), "float32"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (inputs, state), batch = self.state(step)
        projected = self._in(x, step.adapters)
        if self._scales is not None:
            projected = projected * self._scales
        gate, x, dt = projected.split(self._sizes, dim=-1)
        x, b, c = self._conv(x, inputs, batch).split(self._conv_sizes, dim=-1)
        x, b, c = x.unflatten(-1, (-1, self.spec.head_dim)), *(t.unflatten(-1, (self._groups, -1)) for t in (b, c))
        y = self._scan(x, dt, self._step_bias, self._a, b, c, self._d, state, batch).flatten(1)
        return self._out(y * F.silu(gate) if self._norm is None else self._norm(y, gate), step.adapters)

    def _multipliers(self, build: Builder) -> torch.Tensor | None:
        if self.spec.scales is None or not build.loading:
            return None
        inner, mixed, heads = self._sizes
        shared = (mixed - inner) // 2
        sizes = torch.tensor([inner, inner, shared, shared, heads])
        scales = torch.tensor(self.spec.scales).repeat_interleave(sizes)
        return scales.to(build.torch_device, getattr(torch, build.numerics.dtype))
