"""Weights in float8 on CPUs: decoded once into the layout of the native product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pagoda.backends.cpu.kernels_more import NativeMoeMlp
from pagoda.backends.cpu.kernels_native import NativeGemm, PackedWeight
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_fp8 import GemmFp8Facts, dequantised
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts, expert_numbers
from pagoda.ops.native.library import Native


class NativeGemmFp8Decoded(NativeGemm):
    """`gemm_fp8` at the memory and speed of a plain product."""

    def __init__(self, facts: GemmFp8Facts, native: Native | None = None) -> None:
        super().__init__(GemmFacts(facts.dtype, facts.in_features, facts.out_features, facts.bias), native)
        self._block = facts.block

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> PackedWeight:
        plain = dequantised(weights["weight"], weights["scale"], self._block, getattr(torch, self.facts.dtype))
        return super().pack({**weights, "weight": plain}, out)


class NativeMoeMlpFp8Decoded(NativeMoeMlp):
    """`moe_mlp_fp8` likewise; one expert at a time is decoded, into its place."""

    def __init__(self, facts: MoeMlpFp8Facts, native: Native | None = None) -> None:
        super().__init__(facts.plain, native)
        self._stored = facts

    def _pack_one(
        self, gemm: NativeGemm, name: str, weights: Mapping[str, torch.Tensor], expert: int, out: PackedWeight | None
    ) -> PackedWeight:
        plain = expert_numbers(self._stored, weights, name, expert)
        bias = {"bias": weights[f"{name}_bias"][expert]} if self.facts.bias else {}
        return gemm.pack({"weight": plain, **bias}, out)
