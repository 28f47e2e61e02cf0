"""Weights in float8 (e4m3): checkpoints that store them so, however they spell their scales, and conversion of others while they load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.hal.kernel import Facts
from pagoda.ops.linear_fp8 import GemmFp8Facts, quantised
from pagoda.ops.moe_fp8 import MoeMlpFp8Facts, quantised_experts
from pagoda.quant.format import ExpertsUse, FormatUse, LinearPart, LinearUse, StoredTensor
from pagoda.quant.fp8_experts import Fp8Experts
from pagoda.quant.fp8_scales import SCALES, Decoded, rows_of, scale_of, squares
from pagoda.quant.gguf import GgufFormat

STORED = "float8_e4m3fn"
PLAIN = ("router", "shared_gate")
"""Layers that conversion leaves alone: small, and what they decide is all or nothing."""
MULTIPLE = 16
"""Converted matrices have sides that are multiples of it, as libraries' products want."""


class _Kind(NamedTuple):
    """How a part of a linear layer goes: as it is, converted, in its codes, or decoded; `run`: neighbours of one run are stacked."""

    way: str
    block: int = 0
    run: int = 0


class Fp8Format(GgufFormat):
    """`Format` of float8 checkpoints, and of plain ones that are to become float8.

    Args:
        block: side of the squares that share a scale; 0: a scale for each output.
        converts: whether plain linear layers are converted while they load.
    """

    name = "fp8"
    optional_names = (*SCALES, "input_scale")

    def __init__(self, block: int = 0, converts: bool = True) -> None:
        self._block, self._converts = block, converts

    def claims(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
        return _claimed(config.get("quantization_config") or {})

    def bound(self, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Fp8Format:
        stored = config.get("quantization_config") or {}
        # Without tensors the weights are drawn, in plain numbers.
        return Fp8Format(_block_of(stored), converts=not stored or not tensors)

    def product(self, dtype: str, columns: int, inner: int, bias: bool) -> tuple[str, Facts]:
        return "gemm_fp8", GemmFp8Facts(dtype, inner, columns, bias, self._block)

    def linear(self, use: LinearUse) -> tuple[FormatUse, ...]:
        kinds = list(self._kinds(use))
        groups = groupby(range(len(kinds)), key=lambda i: kinds[i])
        return tuple(self._use(replace(use, parts=tuple(use.parts[i] for i in group)), kind) for kind, group in groups)

    def decoded(self, use: LinearUse) -> FormatUse:
        parts = tuple(replace(part, tensors=self._plain_tensors(part.tensors, use.path)) for part in use.parts)
        return super().decoded(replace(use, parts=parts))

    def experts(self, use: ExpertsUse) -> FormatUse:
        """In their codes where all are stored alike and this rank's share ends between squares; else decoded while they load."""
        facts, kinds = use.facts, {self._expert_kind(use, name) for name in use.tensors}
        if len(kinds) != 1 or (kind := kinds.pop()).way in ("plain", "decoded"):
            tensors = {name: self._plain_tensors(stored, use.path) for name, stored in use.tensors.items()}
            return super().experts(replace(use, tensors=tensors))
        coded = MoeMlpFp8Facts(facts, kind.block)
        load, nbytes = Fp8Experts(self, use, coded), coded.nbytes
        if kind.way == "codes":
            return FormatUse("moe_mlp_fp8", coded, tuple(use.tensors), load, nbytes)
        plain = super().experts(use)
        return FormatUse("moe_mlp_fp8", coded, plain.parts, plain.load, nbytes, lambda loaded: quantised_experts(coded, loaded))

    def _expert_kind(self, use: ExpertsUse, name: str) -> _Kind:
        tensors = use.tensors[name]
        tensor = tensors.get("weight")
        if tensor is None or not tensor.dtype.startswith("float8"):
            fits = not any(size % MULTIPLE for size in (use.facts.width, use.facts.hidden))
            return _Kind("converted", self._block) if self._converts and fits else _Kind("plain")
        block = self._checked(tensor, tensors, use.path)
        whole = tensor.shape[-1] if name == "down" else tensor.shape[-2]
        cut = block and (use.hidden.start % block or (use.hidden.stop % block and use.hidden.stop != whole))
        return _Kind("decoded" if cut else "codes", 0 if cut else block)

    def _kinds(self, use: LinearUse) -> Iterator[_Kind]:
        """Of each part. Parts whose squares end inside a part are not stacked with the next one."""
        run = 0
        for part in use.parts:
            kind = self._kind(use, part)
            yield kind._replace(run=run) if kind.way == "codes" else kind
            if kind.block and len(part.rows) % kind.block:
                run += 1

    def _kind(self, use: LinearUse, part: LinearPart) -> _Kind:
        tensor = part.tensors.get("weight")
        if tensor is None or not tensor.dtype.startswith("float8"):
            return _Kind("converted", self._block) if self._converted(use) else _Kind("plain")
        block = self._checked(tensor, part.tensors, use.path)
        starts, ends = (part.rows.start, use.columns.start), ((part.rows.stop, tensor.shape[0]), (use.columns.stop, tensor.shape[1]))
        cut = block and (any(start % block for start in starts) or any(end % block and end != total for end, total in ends))
        return _Kind("decoded" if cut else "codes", 0 if cut else block)

    def _converted(self, use: LinearUse) -> bool:
        sizes = (len(use.columns), *(len(part.rows) for part in use.parts))
        inner = use.path.startswith("layers.") and use.path.rpartition(".")[2] not in PLAIN
        return self._converts and inner and not any(size % MULTIPLE for size in sizes)

    def _use(self, use: LinearUse, kind: _Kind) -> FormatUse:
        if kind.way in ("plain", "decoded"):
            return self.decoded(use)
        facts = GemmFp8Facts(use.dtype, len(use.columns), use.out_features, use.bias, kind.block)
        names = tuple(part.name for part in use.parts)
        size: int = getattr(torch, use.dtype).itemsize
        scales = 1
        for side in facts.scale_shape:
            scales *= side
        nbytes = facts.out_features * (facts.in_features + use.bias * size) + 4 * scales
        if kind.way == "converted":
            return FormatUse("gemm_fp8", facts, names, lambda: self._load(use, None), nbytes, lambda loaded: _convert(loaded, kind.block))
        return FormatUse("gemm_fp8", facts, names, lambda: self._codes(use, kind.block), nbytes)

    def _codes(self, use: LinearUse, block: int) -> dict[str, torch.Tensor]:
        columns = slice(use.columns.start, use.columns.stop)
        weights, scales = [], []
        for part in use.parts:
            rows, (_, scale) = slice(part.rows.start, part.rows.stop), scale_of(part.tensors)
            weights.append(part.tensors["weight"].read((rows, columns)))
            shape = part.tensors["weight"].shape
            scales.append(squares(scale, part.rows, use.columns, block) if block else rows_of(scale, shape, (rows,)))
        loaded = {"weight": torch.cat(weights), "scale": torch.cat(scales)}
        if use.bias:
            loaded["bias"] = torch.cat([self.plain(p.tensors["bias"], use.dtype, (slice(p.rows.start, p.rows.stop),)) for p in use.parts])
        return loaded

    def _plain_tensors(self, tensors: Mapping[str, StoredTensor], path: str) -> dict[str, StoredTensor]:
        """The same with a weight in plain numbers, whichever way it is stored."""
        tensor = tensors.get("weight")
        if tensor is None or not tensor.dtype.startswith("float8"):
            return dict(tensors)
        _, scale = scale_of(tensors)
        return {**tensors, "weight": Decoded(tensor.name, tensor, scale, self._checked(tensor, tensors, path))}

    def _checked(self, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], path: str) -> int:
        """Side of a scale's square, 0 for scales of rows or of the whole."""
        name, scale = scale_of(tensors)
        if tensor.dtype != STORED or not scale:
            raise CheckpointError(f"{path}: {tensor.name} is stored in {tensor.dtype}; float8_e4m3fn beside a weight_scale is read")
        *outer, rows, columns = tensor.shape
        block = self._block if name == "weight_scale_inv" or (self._block and scale.shape[-1] > 1) else 0
        fitting = [(*outer, -(-rows // block), -(-columns // block))] if block else [tuple(outer), (*outer, 1), (*outer, rows)]
        if not block:
            fitting += [(*outer, 1, 1), (*outer, rows, 1), (), (1,)]
        if tuple(scale.shape) not in fitting:
            raise CheckpointError(f"{scale.name} has shape {list(scale.shape)} for {list(tensor.shape)} weights; {fitting} would fit")
        return block


def _convert(loaded: Mapping[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    weight, scale = quantised(loaded["weight"], block)
    return {**loaded, "weight": weight, "scale": scale}


def _block_of(config: Mapping[str, Any]) -> int:
    """Side of the squares that a configuration speaks of; 0 where it speaks of none."""
    sizes = config.get("weight_block_size")
    for group in (config.get("config_groups") or {}).values():
        sizes = sizes or group["weights"].get("block_structure")
    if not sizes:
        return 0
    if sizes[0] != sizes[1]:
        raise CheckpointError(f"scales of blocks of {sizes[0]} × {sizes[1]} weights are not read; square blocks are")
    return int(sizes[0])


def _claimed(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` speaks of e4m3 weights in one of the spellings that are read here."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        return bool(groups) and all(weights.get("type") == "float" and weights.get("num_bits") == 8 for weights in groups)
    if method == "modelopt":
        return str(config.get("quant_algo", "")).upper() == "FP8"
    return method in ("fp8", "fbgemm_fp8")
