"""Linear layers whose weights are float8 (e4m3) codes with scales: `gemm_fp8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of the numbers that e4m3 holds."""


@dataclass(frozen=True)
class GemmFp8Facts:
    """`x [T, in_features] @ (weight · scale)ᵀ (+ bias)`; weight `[out_features, in_features]` in e4m3.

    Attributes:
        dtype: of x, bias and the result.
        block: 0: a scale for each output, `[out_features]` float32; else for each square of so many weights, the last ones cut off:
            `[⌈out_features / block⌉, ⌈in_features / block⌉]`.
    """

    dtype: str
    in_features: int
    out_features: int
    bias: bool = False
    block: int = 0

    @property
    def scale_shape(self) -> tuple[int, ...]:
        if not self.block:
            return (self.out_features,)
        return (-(-self.out_features // self.block), -(-self.in_features // self.block))


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that codes `[…, N, K]` stand for, in `dtype`; multiplied in float32, or in float64 where that is `dtype`: a code times
    its scale has more digits than float32."""
    wide = torch.promote_types(dtype, torch.float32)
    numbers, scale = weight.to(wide), scale.to(wide)
    if not block:
        return (numbers * scale.unsqueeze(-1)).to(dtype)
    rows, columns = weight.shape[-2:]
    spread = scale.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)[..., :columns]
    return (numbers * spread).to(dtype)


def quantised(weight: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and float32 scales of `[…, N, K]`, each scale the least that holds its numbers."""
    if not block:
        scale = weight.abs().amax(-1).float().clamp(min=1e-12) / LARGEST
        return _codes(weight.float() / scale.unsqueeze(-1)), scale
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight, (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))
    scale = squares.abs().amax((-1, -3)).float().clamp(min=1e-12) / LARGEST
    spread = scale.repeat_interleave(block, -2)[..., :rows, :].repeat_interleave(block, -1)[..., :columns]
    return _codes(weight.float() / spread), scale


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-LARGEST, LARGEST).to(E4M3)


class GemmFp8Reference(PlainKernel):
    """`run(packed, x)`: x `[T, in_features]` → `[T, out_features]` in x's dtype.

    Packs `weight` (e4m3), `scale` (float32, shape as in `GemmFp8Facts`) and `bias`. Weights are rounded to x's dtype on every run.
    A kernel may round the rows of x to e4m3 too, and then says so by its `eps`.
    """

    facts: GemmFp8Facts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, dequantised(packed["weight"], packed["scale"], self.facts.block, x.dtype), packed.get("bias"))


def dequantised_bytes(facts: GemmFp8Facts) -> int:
    """What `GemmFp8Dequantised` keeps of one weight."""
    size: int = getattr(torch, facts.dtype).itemsize
    return facts.out_features * (facts.in_features + facts.bias) * size


class GemmFp8Dequantised(PlainKernel):
    """The same, decoded once by `pack`: as fast as a plain product, at the memory of the computing dtype."""

    facts: GemmFp8Facts

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        plain = {"weight": dequantised(weights["weight"], weights["scale"], self.facts.block, getattr(torch, self.facts.dtype))}
        if self.facts.bias:
            plain["bias"] = weights["bias"].clone()
        return plain if out is None else {name: out[name].copy_(tensor) for name, tensor in plain.items()}

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, packed["weight"], packed.get("bias"))
