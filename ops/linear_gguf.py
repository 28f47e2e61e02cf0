"""Linear layers whose weights stay in ggml blocks: `gemm_gguf` and `embedding_gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.gguf.decode import decode, decode_into
from pagoda.ops.gguf.types import GgmlType


@dataclass(frozen=True)
class GemmGgufFacts:
    """`x [T, in_features] @ weightᵀ (+ bias)`; weight `[out_features, in_features]` in blocks.

    Attributes:
        dtype: of x, bias and the result.
        kind: name of the block format ("Q4_1").
    """

    dtype: str
    kind: str
    in_features: int
    out_features: int
    bias: bool = False

    @property
    def row_bytes(self) -> int:
        return GgmlType[self.kind].row_bytes(self.in_features)


class GemmGgufReference(PlainKernel):
    """`run(packed, x)`: x `[T, in_features]` → `[T, out_features]` in x's dtype.

    Packs `weight [out_features, row_bytes]` uint8 and `bias`. The numbers are decoded to float32 on every run and rounded to x's dtype.
    """

    facts: GemmGgufFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        weight = decode(packed["weight"], GgmlType[self.facts.kind]).to(x.dtype)
        return F.linear(x, weight, packed.get("bias"))


def dequantised_bytes(facts: GemmGgufFacts) -> int:
    """What `GemmGgufDequantised` keeps of one weight."""
    size: int = getattr(torch, facts.dtype).itemsize
    return facts.out_features * (facts.in_features + facts.bias) * size


class GemmGgufDequantised(PlainKernel):
    """The same, decoded once by `pack`: as fast as a plain product, at the memory of the computing dtype."""

    facts: GemmGgufFacts

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        blocks, dtype = weights["weight"], getattr(torch, self.facts.dtype)
        packed = out or {"weight": torch.empty(self.facts.out_features, self.facts.in_features, dtype=dtype, device=blocks.device)}
        decode_into(packed["weight"], blocks, GgmlType[self.facts.kind])
        if self.facts.bias:
            packed["bias"] = weights["bias"].clone() if out is None else out["bias"].copy_(weights["bias"])
        return packed

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, packed["weight"], packed.get("bias"))


@dataclass(frozen=True)
class EmbeddingGgufFacts:
    """Rows of `weight [rows, width]` in blocks of `kind`, given in `dtype`; otherwise as `EmbeddingFacts`."""

    dtype: str
    kind: str
    rows: int
    width: int
    first: int = 0
    partial: bool = False
    tied: bool = False


class EmbeddingGgufReference(PlainKernel):
    """`run(packed, ids)`: ids `[T]` int → `[T, width]` in `facts.dtype`.

    Packs `weight [rows, row_bytes]` uint8; only the rows looked up are decoded.
    """

    facts: EmbeddingGgufFacts

    def run(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        local = (ids - self.facts.first).long()
        inside = (local >= 0) & (local < self.facts.rows)
        blocks = packed["weight"][local.clamp(0, self.facts.rows - 1)] if self.facts.partial else packed["weight"][local]
        rows = decode(blocks, GgmlType[self.facts.kind]).to(getattr(torch, self.facts.dtype))
        return torch.where(inside.unsqueeze(-1), rows, 0) if self.facts.partial else rows
