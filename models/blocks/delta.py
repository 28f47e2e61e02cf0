"""The gated delta rule on one rank: heads are split, with the keys and queries that they share."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.hal.kv import StatePart
from pagoda.models.blocks.mamba import negative_exp
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.state import ConvBlock, GatedNormBlock, StateMixer
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.recurrent import GatedDelta, KimiDelta
from pagoda.ops.delta import DeltaFacts


class GatedDeltaBlock(StateMixer):
    """One layer's gated delta rule (Qwen3-Next)."""

    def __init__(self, build: Builder, path: str, spec: GatedDelta, width: int) -> None:
        self.spec = spec
        heads, k_heads, whole = build.shard.split(spec.heads, "value heads"), build.shard.kv_heads(spec.k_heads), Span.whole(width)
        keys, values = k_heads.times(spec.k_dim), heads.times(spec.v_dim)
        self._sizes = [2 * len(keys) + len(values), len(values), len(heads), len(heads)]
        self._conv_sizes = [len(keys), len(keys), len(values)]
        mixed = {"query": keys, "key": keys, "value": values}
        self._in = build.linear(path, {**mixed, "z": values, "beta": heads, "step": heads}, whole, "column")
        self._conv = ConvBlock(build, f"{path}.conv", spec.conv, mixed)
        self._step_bias = build.tensor(f"{path}.step_bias", (heads,), "heads", "float32")
        self._a = build.tensor(f"{path}.a_log", (heads,), "heads", "float32", negative_exp)
        self._norm = GatedNormBlock(build, f"{path}.norm", spec.norm, values)
        self._out = build.linear(path, {"out": whole}, values, "row")
        facts = DeltaFacts(build.numerics.dtype, len(k_heads), len(heads), spec.k_dim, spec.v_dim, double=spec.double_beta)
        kernel = build.kernel("gated_delta_rule", facts)
        self._rule: Any = kernel.run if build.loading else None
        super().__init__(self._conv.part, StatePart((len(heads), spec.k_dim, spec.v_dim), "float32"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (inputs, state), batch = self.state(step)
        mixed, gate, beta, dt = self._in(x, step.adapters).split(self._sizes, dim=-1)
        q, k, v = self._conv(mixed, inputs, batch).split(self._conv_sizes, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, size)) for t, size in ((q, self.spec.k_dim), (k, self.spec.k_dim), (v, self.spec.v_dim)))
        y = self._rule(q, k, v, dt, beta, self._step_bias, self._a, state, batch)
        return self._out(self._norm(y.flatten(1), gate), step.adapters)


class KimiDeltaBlock(StateMixer):
    """One layer's delta rule with a decay per channel (Kimi Linear)."""

    def __init__(self, build: Builder, path: str, spec: KimiDelta, width: int) -> None:
        self.spec = spec
        heads, whole, latent = build.shard.split(spec.heads, "heads of the delta rule"), Span.whole(width), Span.whole(spec.dim)
        own = heads.times(spec.dim)
        self._sizes = [3 * len(own), len(heads)]
        mixed = {"query": own, "key": own, "value": own}
        self._in = build.linear(path, {**mixed, "beta": heads}, whole, "column")
        self._latents = build.linear(path, {"decay_down": latent, "gate_down": latent}, whole, "replicated")
        self._decay = build.linear(path, {"decay": own}, latent, "column")
        self._gate = build.linear(path, {"gate": own}, latent, "column")
        self._conv = ConvBlock(build, f"{path}.conv", spec.conv, mixed)
        self._step_bias = build.tensor(f"{path}.step_bias", (own,), "heads", "float32", lambda x: x.unflatten(0, (-1, spec.dim)))
        one = Span.whole(1)
        self._a = build.tensor(f"{path}.a_log", (one, one, heads, one), "heads", "float32", lambda x: negative_exp(x).flatten())
        self._norm = GatedNormBlock(build, f"{path}.norm", spec.norm, own)
        self._out = build.linear(path, {"out": whole}, own, "row")
        kernel = build.kernel("gated_delta_rule", DeltaFacts(build.numerics.dtype, len(heads), len(heads), spec.dim, spec.dim, True))
        self._rule: Any = kernel.run if build.loading else None
        super().__init__(self._conv.part, StatePart((len(heads), spec.dim, spec.dim), "float32"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (inputs, state), batch = self.state(step)
        decay, gate = (latent.contiguous() for latent in self._latents(x, step.adapters).chunk(2, dim=-1))
        mixed, beta = self._in(x, step.adapters).split(self._sizes, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.spec.dim)) for t in self._conv(mixed, inputs, batch).chunk(3, dim=-1))
        steps = self._decay(decay, step.adapters).unflatten(-1, (-1, self.spec.dim))
        y = self._rule(q, k, v, steps, beta, self._step_bias, self._a, state, batch)
        return self._out(self._norm(y.flatten(1), self._gate(gate, step.adapters)), step.adapters)
