"""Reads a PEFT folder (adapter_config.json, adapter_model.safetensors) into one rank's factors, all checked against the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.models.adapters.config import LoraConfig, read_config
from pagoda.models.adapters.names import Slice, slices_of
from pagoda.models.adapters.slots import Factors
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.load import Description
from pagoda.models.loading.safetensors_header import read_header
from pagoda.models.loading.stored import FileTensor
from pagoda.models.seeing import text_module

_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True)
class Adapter:
    """An adapter on one rank's host.

    Attributes:
        factors: by the path of the slice that they change. rank: the largest of its modules.
        digest: of its files: equal adapters have equal ones.
    """

    factors: Mapping[str, Factors]
    rank: int
    digest: str


class Pair:
    """The factors of one module as stored: down `[r, inputs]`, up `[outputs, r]`."""

    def __init__(self, module: str, down: FileTensor, up: FileTensor) -> None:
        if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
            raise CheckpointError(f"{module}: lora_A {list(down.shape)} and lora_B {list(up.shape)} are no pair; they share no rank")
        self.module, self.down, self.up = module, down, up
        self.rank, self.shape = down.shape[0], (up.shape[0], down.shape[1])


def read_adapter(folder: str | Path, description: Description) -> Adapter:
    """Read and check the whole adapter. Raises `CheckpointError` naming the folder, and the module that does not fit."""
    folder, spec, family = Path(folder), description.spec, description.family
    config = read_config(folder)
    if family is None or isinstance(spec, BridgeSpec):
        raise CheckpointError(f"adapter {folder}: {description.facts.architecture} runs through transformers and takes no adapters")
    try:
        pairs = _pairs(folder)
        _check_ranks(pairs, description)
        factors = {}
        for pair in pairs:
            rules = family.rules(spec)
            module = pair.module if description.sees is None else text_module(pair.module)
            for path, where in slices_of(module, pair.shape, rules, description.adaptable).items():
                factors[path] = _factors(pair, where, config, description.numerics.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"adapter {folder}: {error}") from None
    return Adapter(factors, max(pair.rank for pair in pairs), _digest(folder))


def _weights(folder: Path) -> Path:
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise CheckpointError(
            "holds adapter_model.bin alone; save it with safe_serialization=True" if pickled else "holds no adapter_model.safetensors"
        )
    return path


def _pairs(folder: Path) -> list[Pair]:
    sides: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in read_header(_weights(folder)).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(_foreign(name))
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    half = sorted(module for module, found in sides.items() if len(found) < 2)
    if half or not sides:
        raise CheckpointError(f"{half[0]} has lora_A or lora_B alone; save the adapter again" if half else "holds no tensors")
    return [Pair(module, found["A"], found["B"]) for module, found in sides.items()]


def _foreign(name: str) -> str:
    if "magnitude" in name:
        return f"{name} belongs to a weight-decomposed adapter (DoRA), which is not supported; merge it into its model"
    if "lora_embedding" in name:
        return f"{name}: adapters of the embedding are not supported; train without it, or merge the adapter into its model"
    return f"{name} is no tensor of a LoRA adapter; only lora_A and lora_B weights are supported"


def _check_ranks(pairs: list[Pair], description: Description) -> None:
    largest = max(pairs, key=lambda pair: pair.rank)
    if description.lora is None:
        raise CheckpointError("there is no room for adapters: start with --enable-lora")
    if largest.rank > description.lora.rank:
        raise CheckpointError(
            f"{largest.module} has rank {largest.rank}, the room is for {description.lora.rank}: start with --max-lora-rank {largest.rank}"
        )


def _factors(pair: Pair, where: Slice, config: LoraConfig, dtype: str) -> Factors:
    down, up = pair.down.read().float(), pair.up.read().float()
    if not (down.isfinite().all() and up.isfinite().all()):
        raise CheckpointError(f"{pair.module} holds numbers that are not finite; train it again")
    scaled = up[where.rows] * config.scale(pair.module, pair.rank)
    wanted = getattr(torch, dtype)
    return Factors(down[:, where.columns].to(wanted), scaled.T.contiguous().to(wanted))


def _digest(folder: Path) -> str:
    digest = blake2b((folder / "adapter_config.json").read_bytes(), digest_size=16)
    with open(folder / "adapter_model.safetensors", "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
