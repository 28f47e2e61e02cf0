"""Our kernels themselves, imported when one is chosen."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.norm import NormFacts


class PaperRmsNorm(PlainKernel):
    """`run(packed, x)` as `rms_norm` says."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), (self.facts.width,), packed["weight"].float(), self.facts.eps).to(x.dtype)


class PaperGate(PlainKernel):
    """`run(x)` as `gated_activation` says, for silu."""

    facts: ActivationFacts

    def run(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (half.float() for half in x.chunk(2, dim=-1))
        if self.facts.limit is not None:
            gate, up = gate.clamp(max=self.facts.limit), up.clamp(-self.facts.limit, self.facts.limit)
        return (gate * torch.sigmoid(gate) * up).to(x.dtype)
