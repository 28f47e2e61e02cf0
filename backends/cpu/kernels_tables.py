"""Tables of embeddings in the layout of the products, for heads that multiply by the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pagoda.backends.cpu.kernels_more import NativeGemmGguf
from pagoda.backends.cpu.kernels_native import NativeGemm
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear import EmbeddingFacts, GemmFacts
from pagoda.ops.linear_gguf import EmbeddingGgufFacts, GemmGgufFacts
from pagoda.ops.native.library import Native, load

_threads = torch.get_num_threads


class NativeEmbedding(PlainKernel):
    """`embedding`: rows gathered from packed columns."""

    facts: EmbeddingFacts

    def __init__(self, facts: EmbeddingFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        native = native or load()
        self._head = NativeGemm(GemmFacts(facts.dtype, facts.width, facts.rows), native)
        self._gather, self._dtype = native.gather, getattr(torch, facts.dtype)

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        return self._head.pack(weights, out)

    def run(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        return gathered(self._gather, packed, ids, self.facts.width, self._dtype)


class NativeEmbeddingGguf(PlainKernel):
    """`embedding_gguf`: the same of blocks."""

    facts: EmbeddingGgufFacts

    def __init__(self, facts: EmbeddingGgufFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        native = native or load()
        self._head = NativeGemmGguf(GemmGgufFacts(facts.dtype, facts.kind, facts.width, facts.rows), native)
        self._gather, self._dtype = native.quant_gather, getattr(torch, facts.dtype)

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        return self._head.pack(weights, out)

    def run(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        return gathered(self._gather, packed, ids, self.facts.width, self._dtype)


def gathered(gather: Any, packed: Any, ids: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` of a packed weight, `[T, width]`."""
    ids = ids.long().contiguous()
    out = torch.empty((len(ids), width), dtype=dtype)
    gather(packed.handle, ids.data_ptr(), len(ids), out.data_ptr(), width, _threads())
    return out
