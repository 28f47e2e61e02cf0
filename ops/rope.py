"""Rotary position embedding (arXiv:2104.09864). Tables come from the model, one look-up a step for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pagoda.hal.kernel import PlainKernel

RopeStyle = Literal["neox", "interleaved"]


@dataclass(frozen=True)
class RopeFacts:
    """Rotate the first `rotary_dim` numbers of each head.

    Attributes:
        style: "neox" pairs i with i + rotary_dim/2, "interleaved" pairs 2i with 2i + 1.
    """

    dtype: str
    head_dim: int
    rotary_dim: int
    style: RopeStyle = "neox"


class RopeReference(PlainKernel):
    """`run(q, k, cos, sin)`: q `[T, H, D]`, k `[T, Hk, D]`, cos and sin `[T, rotary_dim/2]` float32 → rotated (q, k).

    q and k are consumed: a kernel may rotate in place and return them.
    """

    facts: RopeFacts

    def run(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotary = self.facts.rotary_dim
        turned, kept = x[..., :rotary], x[..., rotary:]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if self.facts.style == "neox":
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((out.to(x.dtype), kept), dim=-1)
