"""adapter_config.json of a PEFT folder: what is read of it, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.json_file import read_json

REFUSED: Mapping[str, str] = {
    "use_dora": "weight-decomposed adapters (DoRA)",
    "lora_bias": "biases of adapters",
    "modules_to_save": "whole modules saved beside the adapter",
    "target_parameters": "adapters of bare parameters, such as experts",
    "trainable_token_indices": "trained token embeddings",
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA's pooled inputs",
    "alora_invocation_tokens": "activated adapters (aLoRA)",
}
"""Keys that change what the adapter computes, and what they mean."""


@dataclass(frozen=True)
class LoraConfig:
    """An adapter's numbers: `alpha / rank` scales it, `alpha / √rank` with rank-stabilised scaling; `alphas` by module pattern."""

    rank: int
    alpha: float
    stabilised: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)

    def scale(self, module: str, rank: int) -> float:
        """Of one module, whose factors have this rank."""
        alpha = next((value for key, value in self.alphas.items() if re.match(rf"(?:.*\.)?(?:{key})$", module)), self.alpha)
        return float(alpha / rank**0.5 if self.stabilised else alpha / rank)


def read_config(folder: Path) -> LoraConfig:
    """Raises `CheckpointError` for a folder without adapter and for kinds of adapters that are not supported."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no adapter_config.json; give the folder that PEFT's save_pretrained wrote")
    values = read_json(path)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        found = values.get("peft_type") if isinstance(values, dict) else type(values).__name__
        raise CheckpointError(f"{path} has peft_type {found!r}; only LORA adapters are supported")
    _refuse(path, values)
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{path} has r={rank!r} and lora_alpha={alpha!r}; both must be numbers, r at least 1")
    return LoraConfig(rank, alpha, bool(values.get("use_rslora")), dict(values.get("alpha_pattern") or {}))


def _refuse(path: Path, values: Mapping[str, Any]) -> None:
    if values.get("bias", "none") != "none":
        raise CheckpointError(f"{path} has bias={values['bias']!r}; only adapters with bias='none' are supported")
    for key, meaning in REFUSED.items():
        if values.get(key):
            raise CheckpointError(f"{path} has {key}={values[key]!r}: {meaning} are not supported; merge the adapter into its model")
