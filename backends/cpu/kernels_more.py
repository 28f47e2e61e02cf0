"""Primitives composed of native products: experts, and weights in ggml blocks decoded once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pagoda.backends.cpu.kernels_native import NativeActivation, NativeGatedActivation, NativeGemm, PackedWeight
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ActivationFacts
from pagoda.ops.gguf.decode import decode_into
from pagoda.ops.gguf.i_blocks import grid_of
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.head_gemm import HeadGemmFacts
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_gguf import GemmGgufFacts
from pagoda.ops.lora import LoraFacts
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.native.arena import arena
from pagoda.ops.native.library import BLOCK_KINDS, TYPES, LoraArgs, Native, QuantArgs, load

_threads = torch.get_num_threads


class PackedBlocks:
    """A weight in ggml's blocks, repacked for the products, and the structure that describes it."""

    __slots__ = ("args", "handle", "outer", "tensors")

    def __init__(self, facts: GemmGgufFacts, native: Native, any_order: bool = False) -> None:
        padded = -(-facts.out_features // 32) * 32
        bias = torch.zeros(padded, dtype=torch.float32) if facts.bias else None
        address = None if bias is None else bias.data_ptr()
        kind, table = BLOCK_KINDS[facts.kind], grid_of(facts.kind)
        where = None if table is None else table.data_ptr()
        self.args = QuantArgs(facts.in_features, facts.out_features, kind, TYPES[facts.dtype], None, address, where, any_order)
        self.handle = ctypes.addressof(self.args)
        weight = arena().take(native.quant_bytes(self.handle))
        self.args.weight = weight.data_ptr()
        self.tensors, self.outer = (weight, bias, table), facts.out_features


class NativeGemmGguf(PlainKernel):
    """`gemm_gguf` with as many bits a weight as the blocks have: products with the codes are exact, scales come after."""

    facts: GemmGgufFacts
    any_order = False

    def __init__(self, facts: GemmGgufFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._native = native or load()
        self._gemm = self._native.quant_gemm

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> PackedBlocks:
        packed = out or PackedBlocks(self.facts, self._native, self.any_order)
        blocks = weights["weight"].contiguous()
        self._native.quant_pack(packed.handle, blocks.data_ptr(), blocks.shape[1], packed.args.weight)
        if self.facts.bias:
            packed.tensors[1][: self.facts.out_features].copy_(weights["bias"])
        return packed

    def share(self, packed: PackedBlocks) -> PackedBlocks:
        return packed

    def run(self, packed: PackedBlocks, x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, outer = x.shape[0], packed.outer
        out = torch.empty((rows, outer), dtype=x.dtype)
        if rows:
            self._gemm(packed.handle, x.data_ptr(), x.stride(0), rows, out.data_ptr(), outer, _threads())
        return out


class NativeGemmGgufPrompt(NativeGemmGguf):
    """The same, by panels of 13-bit integers where rows are many."""

    any_order = True


class NativeGemmGgufDecoded(NativeGemm):
    """`gemm_gguf` as a dense product: blocks are decoded to the computing dtype by `pack`, and the blocks are dropped."""

    def __init__(self, facts: GemmGgufFacts, native: Native | None = None) -> None:
        super().__init__(GemmFacts(facts.dtype, facts.in_features, facts.out_features, facts.bias), native)
        self._kind = GgmlType[facts.kind]

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> PackedWeight:
        plain = torch.empty(self.facts.out_features, self.facts.in_features, dtype=getattr(torch, self.facts.dtype))
        return super().pack({**weights, "weight": decode_into(plain, weights["weight"], self._kind)}, out)


class NativeHeadGemm(PlainKernel):
    """`head_gemm`: a product for each head, written where it belongs."""

    facts: HeadGemmFacts

    def __init__(self, facts: HeadGemmFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        native = native or load()
        self._product = NativeGemm(GemmFacts(facts.dtype, facts.in_features, facts.out_features, False), native)
        self._gemm = native.gemm

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> list[PackedWeight]:
        old = out or [None] * self.facts.heads
        return [self._product.pack({"weight": matrix}, before) for matrix, before in zip(weights["weight"], old, strict=True)]

    def run(self, packed: list[PackedWeight], x: torch.Tensor) -> torch.Tensor:
        if x.stride(2) != 1:
            x = x.contiguous()
        (rows, heads, _), outer = x.shape, self.facts.out_features
        out = torch.empty((rows, heads, outer), dtype=x.dtype)
        start, step, threads = x.data_ptr(), x.stride(1) * x.element_size(), _threads()
        for head, one in enumerate(packed):
            place = out.data_ptr() + head * outer * out.element_size()
            self._gemm(one.handle, start + head * step, x.stride(0), rows, place, heads * outer, threads)
        return out


class NativeLoraDelta(PlainKernel):
    """`lora_delta` that touches the adapters of the rows alone; four rows of one share what is loaded of it."""

    facts: LoraFacts

    def __init__(self, facts: LoraFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        self._lora = (native or load()).lora
        self._columns = torch.tensor(facts.parts)
        sizes = (facts.in_features, facts.out_features, facts.rank, facts.slots, len(facts.parts), TYPES[facts.dtype])
        self._args = LoraArgs(*sizes, self._columns.data_ptr())
        self._handle = ctypes.addressof(self._args)

    def run(self, out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor) -> None:
        x = x if x.stride(1) == 1 else x.contiguous()
        self._lora(
            self._handle, x.data_ptr(), x.stride(0), down.data_ptr(), up.data_ptr(), slots.contiguous().data_ptr(), x.shape[0],
            out.data_ptr(), _threads(),
        )  # fmt: skip


class NativeMoeMlp(PlainKernel):
    """`moe_mlp` that touches the chosen experts alone, each once, with the tokens that chose it.

    Experts are added in ascending order in float32, so a token's result does not depend on its neighbours.
    """

    facts: MoeMlpFacts

    def __init__(self, facts: MoeMlpFacts, native: Native | None = None) -> None:
        super().__init__(facts)
        native = native or load()
        wide = facts.hidden * (2 if facts.gated else 1)
        self._up = NativeGemm(GemmFacts(facts.dtype, facts.width, wide, facts.bias), native)
        self._down = NativeGemm(GemmFacts(facts.dtype, facts.hidden, facts.width, facts.bias), native)
        self._act = _activation(facts, native)
        self._local = facts.local or facts.experts

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> list[tuple[PackedWeight, PackedWeight]]:
        old = out or [(None, None)] * self._local
        return [
            (self._pack_one(self._up, "up", weights, e, old[e][0]), self._pack_one(self._down, "down", weights, e, old[e][1]))
            for e in range(self._local)
        ]

    def _pack_one(
        self, gemm: NativeGemm, name: str, weights: Mapping[str, torch.Tensor], expert: int, out: PackedWeight | None
    ) -> PackedWeight:
        bias = {"bias": weights[f"{name}_bias"][expert]} if self.facts.bias else {}
        return gemm.pack({"weight": weights[name][expert], **bias}, out)

    def run(
        self, packed: list[tuple[PackedWeight, PackedWeight]], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        order = ids.flatten().argsort(stable=True)
        tokens, shares = order // self.facts.top_k, weights.flatten()[order].unsqueeze(1).float()
        found = torch.bincount(ids.flatten(), minlength=self.facts.experts)
        assert found.sum().item() == ids.numel()  # `item` and not `tolist` alone: a recorder of steps sees that a value is looked at
        counts = found.tolist()
        start = sum(counts[: self.facts.first])
        for expert in range(self._local):
            count = counts[self.facts.first + expert]
            if count:
                mine = slice(start, start + count)
                total.index_add_(0, tokens[mine], self._expert(packed[expert], x[tokens[mine]], shares[mine]))
            start += count
        return total.to(x.dtype)

    def _expert(self, packed: tuple[PackedWeight, PackedWeight], x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        if self.facts.scale_input:
            x = (x * shares).to(x.dtype)
        out = self._down.run(packed[1], self._act(self._up.run(packed[0], x))).float()
        return out if self.facts.scale_input else out * shares


def _activation(facts: MoeMlpFacts, native: Native) -> Callable[[torch.Tensor], torch.Tensor]:
    if not facts.gated:
        return NativeActivation(ActivationFacts(facts.dtype, facts.activation), native).run
    if facts.limit is None or facts.alpha is None:
        return NativeGatedActivation(ActivationFacts(facts.dtype, facts.activation), native).run
    return NativeGatedActivation(ActivationFacts(facts.dtype, "alpha", facts.limit), native, facts.alpha, 1.0).run
