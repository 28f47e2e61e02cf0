"""Normalisation: `rms_norm`, `add_rms_norm`, `layer_norm`, `gated_norm`. Statistics are float32 whatever the dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel


@dataclass(frozen=True)
class NormFacts:
    """Normalise the last dimension, `width` wide.

    Attributes:
        offset: added to the weight (1.0 for Gemma's `1 + w`, whose product is taken before the cast).
        weight, bias: whether there are any.
    """

    dtype: str
    width: int
    eps: float
    offset: float = 0.0
    weight: bool = True
    bias: bool = False


class RmsNormReference(PlainKernel):
    """`run(packed, x)`: x `[..., width]` → same shape: `x / sqrt(mean(x²) + eps) · (weight + offset)` (arXiv:1910.07467)."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.facts.eps)
        if not self.facts.weight:
            return normed.to(x.dtype)
        if self.facts.offset:
            return (normed * (packed["weight"].to(wide.dtype) + self.facts.offset)).to(x.dtype)
        return normed.to(x.dtype) * packed["weight"]


class AddRmsNormReference(RmsNormReference):
    """`run(packed, x, residual)` → (norm(x + residual), x + residual); `residual` may be overwritten."""

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        total = x + residual
        return super().run(packed, total), total


class LayerNormReference(PlainKernel):
    """`run(packed, x)`: `(x − mean) / sqrt(var + eps) · weight + bias` over the last dimension (arXiv:1607.06450)."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        weight = packed["weight"] if self.facts.weight else None
        bias = packed["bias"] if self.facts.bias else None
        if weight is not None and self.facts.offset:
            weight = weight + self.facts.offset
        return F.layer_norm(x, (self.facts.width,), weight, bias, self.facts.eps)


@dataclass(frozen=True)
class GatedNormFacts:
    """Normalise each of `groups` parts of a row, `width` wide, and multiply by a gate.

    Attributes:
        gate: what becomes of the gate's numbers. gate_first: they are multiplied before the norm, else after it.
        weight: all parts share one of `width` numbers, or each number has its own.
    """

    dtype: str
    width: int
    groups: int
    eps: float
    gate: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False
    weight: Literal["shared", "own"] = "shared"


class GatedNormReference(PlainKernel):
    """`run(packed, x, gate)`: x, gate `[T, groups · width]`, rows of any step → the same shape, rounded once:
    norm(x) · weight · act(gate), or norm(x · act(gate)) · weight, as arXiv:2405.21060 and arXiv:2412.06464 have them. Packs `weight`."""

    facts: GatedNormFacts

    def run(self, packed: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        facts = self.facts
        dtype, wide = x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = packed["weight"].to(wide)
        factor = gate.to(wide).sigmoid() if facts.gate == "sigmoid" else F.silu(gate.to(wide))
        whole = x.to(wide) * factor if facts.gate_first else x.to(wide)
        parts = whole.unflatten(-1, (facts.groups, facts.width))
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + facts.eps)
        scaled = (normed * weight).flatten(-2) if facts.weight == "shared" else normed.flatten(-2) * weight
        return (scaled if facts.gate_first else scaled * factor).to(dtype)
