"""`head_gemm`: a linear layer for each head, such as those that attention over latents puts before and behind itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel


@dataclass(frozen=True)
class HeadGemmFacts:
    """`x [T, heads, in_features]` times a matrix for each head, `[heads, out_features, in_features]`."""

    dtype: str
    heads: int
    in_features: int
    out_features: int


class HeadGemmReference(PlainKernel):
    """`run(packed, x)`: x `[T, H, in_features]`, any strides → `[T, H, out_features]`. Packs `weight` `[H, out_features, in_features]`."""

    facts: HeadGemmFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), packed["weight"].transpose(1, 2)).transpose(0, 1).contiguous()


class HeadGemmTorch(HeadGemmReference):
    """The same through torch's library, each head's result written where it belongs."""

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.facts.heads, self.facts.out_features)
        torch.bmm(x.transpose(0, 1), packed["weight"].transpose(1, 2), out=out.transpose(0, 1))
        return out
