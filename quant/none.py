"""Weights as they are: numbers of a torch dtype, computed with in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.hal.kernel import Facts
from pagoda.ops.linear import GemmFacts
from pagoda.quant.format import StoredTensor
from pagoda.quant.gguf import GgufFormat, block_type


class PlainFormat(GgufFormat):
    """`Format` of unquantised checkpoints: what the GGUF format does with tensors that lie in no blocks."""

    name = "none"

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
        return not config.get("quantization_config") and not any(block_type(tensor) for tensor in tensors.values())

    def product(self, dtype: str, columns: int, inner: int, bias: bool) -> tuple[str, Facts]:
        return "gemm", GemmFacts(dtype, inner, columns, bias)
