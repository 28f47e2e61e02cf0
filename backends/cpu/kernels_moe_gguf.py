"""Experts in ggml blocks through native products: as they are stored, or decoded once."""

from __future__ import annotations

from pagoda.backends.cpu.kernels_more import NativeGemmGguf, NativeGemmGgufDecoded, NativeMoeMlp
from pagoda.ops.linear_gguf import GemmGgufFacts
from pagoda.ops.moe_gguf import MoeMlpGgufFacts
from pagoda.ops.native.library import Native


def gemm_facts(facts: MoeMlpGgufFacts, name: str) -> GemmGgufFacts:
    """Of one expert's "up" or "down" product."""
    _, outputs, inputs = facts.shape(name)
    return GemmGgufFacts(facts.dtype, facts.kind(name).name, inputs, outputs, facts.plain.bias)


class NativeMoeMlpGguf(NativeMoeMlp):
    """`moe_mlp_gguf`: chosen experts alone, each once, their blocks multiplied as they are."""

    product: type[NativeGemmGguf] | type[NativeGemmGgufDecoded] = NativeGemmGguf

    def __init__(self, facts: MoeMlpGgufFacts, native: Native | None = None) -> None:
        super().__init__(facts.plain, native)
        self._up = self.product(gemm_facts(facts, "up"), native)
        self._down = self.product(gemm_facts(facts, "down"), native)


class NativeMoeMlpGgufDecoded(NativeMoeMlpGguf):
    """The same with blocks decoded to the computing dtype by `pack`."""

    product = NativeGemmGgufDecoded
