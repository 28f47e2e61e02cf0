"""Weights in ggml blocks, as GGUF files store them: they stay in their blocks, and `gemm_gguf` computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.hal.kernel import Facts
from pagoda.ops.gguf.decode import decode_into
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.linear import GemmFacts
from pagoda.ops.linear_gguf import EmbeddingGgufFacts, GemmGgufFacts
from pagoda.ops.moe_gguf import MoeMlpGgufFacts
from pagoda.quant.experts import Experts
from pagoda.quant.format import EmbeddingUse, ExpertsUse, Format, FormatUse, LinearPart, LinearUse, StoredTensor

Index = tuple[slice, ...]

KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "prob_scale", "prob_output_scale")
"""Last words of tensors that speak of attention's numbers and not of weights."""


def block_type(tensor: StoredTensor) -> GgmlType | None:
    """The block format of a stored tensor; None when it is in a torch dtype."""
    return GgmlType[tensor.dtype] if tensor.dtype in GgmlType.__members__ else None


class GgufFormat:
    """`Format` of checkpoints with block-stored weights. Plain tensors among them go the plain way."""

    name = "gguf"
    tensor_names: tuple[str, ...] = ("weight",)
    optional_names: tuple[str, ...] = ()
    spare: tuple[str, ...] = KV_SCALES

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
        return any(block_type(tensor) for tensor in tensors.values())

    def bound(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Format:
        return self

    def product(self, dtype: str, columns: int, inner: int, bias: bool) -> tuple[str, Facts]:
        return "gemm_gguf", GemmFacts(dtype, inner, columns, bias)

    def names_of(self, path: str) -> tuple[str, ...]:
        return self.tensor_names

    def linear(self, use: LinearUse) -> tuple[FormatUse, ...]:
        """Neighbouring parts in one format become one use; K-quant mixes store v and down in more bits than q and gate."""
        groups = groupby(use.parts, key=lambda part: _kept_blocks(part, use.columns))
        return tuple(self._linear(replace(use, parts=tuple(parts)), kind) for kind, parts in groups)

    def decoded(self, use: LinearUse) -> FormatUse:
        return self._linear(use, None)

    def experts(self, use: ExpertsUse) -> FormatUse:
        """In their blocks where gate and up share a format and this rank's hidden numbers are whole blocks; else decoded at load."""
        kinds = _expert_kinds(use)
        load = Experts(self, use, kinds)
        if kinds is None:
            return FormatUse("moe_mlp", use.facts, tuple(use.tensors), load, load.nbytes)
        facts = MoeMlpGgufFacts(use.facts, *(kind.name for kind in kinds))
        return FormatUse("moe_mlp_gguf", facts, tuple(use.tensors), load, load.nbytes)

    def embedding(self, use: EmbeddingUse) -> FormatUse:
        facts, tensor = use.facts, use.tensors.get("weight")
        kind = block_type(tensor) if tensor else None
        if kind is None:
            load = lambda: {"weight": self._padded(self._rows(use, None), facts.rows)}  # noqa: E731
            return FormatUse("embedding", facts, ("weight",), load, facts.rows * facts.width * _itemsize(facts.dtype))
        block_facts = EmbeddingGgufFacts(facts.dtype, kind.name, facts.rows, facts.width, facts.first, facts.partial, facts.tied)
        load = lambda: {"weight": self._padded(self._rows(use, kind), facts.rows)}  # noqa: E731
        return FormatUse("embedding_gguf", block_facts, ("weight",), load, facts.rows * kind.row_bytes(facts.width))

    def plain(self, tensor: StoredTensor, dtype: str, index: Index = ()) -> torch.Tensor:
        kind, wanted = block_type(tensor), getattr(torch, dtype)
        if kind is None:
            return tensor.read(index).to(wanted)
        blocks, last = _whole_rows(tensor, index)
        out = torch.empty(*blocks.shape[:-1], tensor.shape[-1], dtype=wanted)
        decode_into(out.view(-1, out.shape[-1]), blocks.reshape(-1, blocks.shape[-1]), kind)
        return out[..., last]

    def _linear(self, use: LinearUse, kind: GgmlType | None) -> FormatUse:
        out, columns = use.out_features, len(use.columns)
        names = tuple(part.name for part in use.parts)
        bias_bytes = out * _itemsize(use.dtype) if use.bias else 0
        if kind is None:
            plain = GemmFacts(use.dtype, columns, out, use.bias)
            return FormatUse("gemm", plain, names, lambda: self._load(use, kind), out * columns * _itemsize(use.dtype) + bias_bytes)
        facts = GemmGgufFacts(use.dtype, kind.name, columns, out, use.bias)
        return FormatUse("gemm_gguf", facts, names, lambda: self._load(use, kind), out * facts.row_bytes + bias_bytes)

    def _load(self, use: LinearUse, kind: GgmlType | None) -> dict[str, torch.Tensor]:
        loaded = {"weight": _stacked(list(self._parts(use, kind)))}
        if use.bias:
            biases = [self.plain(part.tensors["bias"], use.dtype, (_span(part.rows),)) for part in use.parts]
            loaded["bias"] = _stacked(biases)
        return loaded

    def _parts(self, use: LinearUse, kind: GgmlType | None) -> Iterator[torch.Tensor]:
        for part in use.parts:
            tensor, index = part.tensors["weight"], (_span(part.rows), _span(use.columns))
            yield self.plain(tensor, use.dtype, index) if kind is None else tensor.read(index)

    def _rows(self, use: EmbeddingUse, kind: GgmlType | None) -> torch.Tensor:
        tensor, index = use.tensors["weight"], (_span(use.rows),)
        return self.plain(tensor, use.facts.dtype, index) if kind is None else tensor.read(index)

    @staticmethod
    def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
        # Zero bytes are zeros in every block format.
        return rows if rows.shape[0] == count else torch.cat([rows, rows.new_zeros(count - rows.shape[0], rows.shape[1])])


def _kept_blocks(part: LinearPart, columns: range) -> GgmlType | None:
    """The format that a part stays in; None where it is plain, or where a rank's columns cut through blocks and it must be decoded."""
    tensor = part.tensors.get("weight")
    kind = block_type(tensor) if tensor else None
    if kind is None or tensor is None:
        return None
    if part.rows.stop > tensor.shape[0] or columns.stop > tensor.shape[-1]:
        needed = [part.rows.stop, columns.stop]
        raise CheckpointError(
            f"{tensor.name} has shape {list(tensor.shape)}, at least {needed} is needed; the file and its config disagree"
        )
    return None if columns.start % kind.block or columns.stop % kind.block else kind


def _expert_kinds(use: ExpertsUse) -> tuple[GgmlType, GgmlType] | None:
    found = {part: block_type(tensors["weight"]) for part, tensors in use.tensors.items() if "weight" in tensors}
    gate, up, down = found.get("gate", found.get("up")), found.get("up"), found.get("down")
    if up is None or down is None or gate != up or use.hidden.start % down.block or use.hidden.stop % down.block:
        return None
    return up, down


def _whole_rows(tensor: StoredTensor, index: Index) -> tuple[torch.Tensor, slice]:
    rank = len(tensor.shape)
    return (tensor.read(index[: rank - 1]), index[rank - 1]) if len(index) == rank else (tensor.read(index), slice(None))


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _span(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size
