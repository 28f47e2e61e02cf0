"""Random LoRA adapters as PEFT writes them, and the same model with one merged into its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules_of(model: Path, targets: Sequence[str] = ALL) -> dict[str, tuple[int, ...]]:
    """Module → shape of its weight, of the layers' modules that end in one of `targets`."""
    tensors = load_file(model / "model.safetensors")
    names = {name.removesuffix(".weight"): tuple(tensor.shape) for name, tensor in tensors.items() if tensor.dim() == 2}
    return {name: shape for name, shape in names.items() if name.rpartition(".")[2] in targets}


def make_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, ...]],
    seed: int,
    rank: int = 4,
    strength: float = 1.0,
    transposed: bool = False,
    **config: Any,
) -> Path:
    """Save a random adapter of these modules; `transposed`: weights are stored `[inputs, outputs]`."""
    gen = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in modules.items():
        outputs, inputs = reversed(shape) if transposed else shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=gen) * inputs**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=gen) * strength * rank**-0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in modules})
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merged(model: Path, adapter: Path, out: Path, transposed: bool = False) -> Path:
    """The model with the adapter added to its weights in float64, saved in float32."""
    shutil.copytree(model, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in factors if name.endswith("lora_A.weight")]:
        down, up = factors[name].double(), factors[name.replace("lora_A", "lora_B")].double()
        rank = down.shape[0]
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        delta = scale * up @ down
        tensors[weight] = (tensors[weight].double() + (delta.T if transposed else delta)).float()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
