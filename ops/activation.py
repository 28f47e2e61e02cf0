"""Activations of the feed-forward: `gated_activation` (gate and up side by side) and `activation` (plain)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel

ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class ActivationFacts:
    """`kind` applied elementwise. `limit` clamps gate from above and up to ± limit before use (GPT-OSS); None: no clamp."""

    dtype: str
    kind: str
    limit: float | None = None


class GatedActivationReference(PlainKernel):
    """`run(x)`: x `[..., 2F]`, gate first then up → `act(gate) · up`, `[..., F]`."""

    facts: ActivationFacts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        if self.facts.limit is not None:
            gate, up = gate.clamp(max=self.facts.limit), up.clamp(-self.facts.limit, self.facts.limit)
        return ACTIVATIONS[self.facts.kind](gate) * up


class ActivationReference(PlainKernel):
    """`run(x)` → `act(x)`, same shape."""

    facts: ActivationFacts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.facts.kind](x)
