"""GGUF metadata by key, and the part of config.json that nearly all families share, rotary scalings included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pagoda.hal.errors import CheckpointError, ModelError
from pagoda.quant.format import StoredTensor

Tensors = Mapping[str, StoredTensor]
MOST_LAYERS = 4096
"""More than any model has; a damaged number must not keep us busy."""

_MISSING: Any = object()


class Metadata:
    """The metadata of one model file, read by key below its architecture's name."""

    def __init__(self, values: Mapping[str, Any], tensors: Tensors) -> None:
        self.values = values
        self.tensors = tensors
        self.architecture = str(values.get("general.architecture", ""))

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """`<architecture>.<key>`. Raises `ModelError` when it is missing and there is no default."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise ModelError(f"the GGUF metadata lacks {self.architecture}.{key}; the file is incomplete, convert the model again")
        return value

    def size(self, key: str, default: Any = _MISSING, most: int = 2**31) -> int:
        """A positive number below `most`. Of a key that may hold one value per layer, all must be equal."""
        value = self.get(key, default)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise ModelError(f"{self.architecture}.{key} differs from layer to layer ({value}); this model type has one value")
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < most:
            raise CheckpointError(f"the GGUF metadata has {self.architecture}.{key} = {value!r}, expected a number from 1 to {most - 1}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A finite number as a float; a `default` of None stays None."""
        value = self.get(key, default)
        if value is None and default is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise CheckpointError(f"the GGUF metadata has {self.architecture}.{key} = {value!r}, expected a number")
        return float(value)

    @property
    def layers(self) -> int:
        return self.size("block_count", most=MOST_LAYERS)

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors


def decoder_config(metadata: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    """The keys that all but the oldest families share."""
    width, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", width // heads)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        **_epsilon(metadata),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, head_dim),
        "vocab_size": vocab_size(metadata),
        "hidden_act": "silu",
        "tie_word_embeddings": not metadata.has("output.weight"),
    }


def _epsilon(metadata: Metadata) -> dict[str, Any]:
    rms = metadata.number("attention.layer_norm_rms_epsilon", None)
    return {"rms_norm_eps": rms} if rms is not None else {"layer_norm_eps": metadata.number("attention.layer_norm_epsilon")}


def vocab_size(metadata: Metadata) -> int:
    """Rows of the logits; the table knows better than the lists."""
    table = metadata.tensors.get("token_embd.weight")
    return table.shape[0] if table else metadata.size("vocab_size", len(metadata.values.get("tokenizer.ggml.tokens", ())))


def _rope_scaling(metadata: Metadata, head_dim: int) -> dict[str, Any] | None:
    if metadata.has("rope_freqs.weight"):
        return _frequency_factors(metadata, metadata.tensors["rope_freqs.weight"].read().float())
    if metadata.has("rope_factors_short.weight"):
        return _longrope(metadata)
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.number("rope.scaling.factor", None)
    # Old files name the linear factor alone.
    factor = factor or metadata.number("rope.scale_linear", None)
    if kind == "none" and factor in (None, 0.0, 1.0):
        return None
    scaling = {"rope_type": "linear" if kind == "none" else kind, "factor": float(factor or 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.size("rope.scaling.original_context_length", metadata.size("context_length"))
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.number(f"rope.scaling.{theirs}", None) is not None:
                scaling[ours] = metadata.number(f"rope.scaling.{theirs}")
    return scaling


def _frequency_factors(metadata: Metadata, factors: torch.Tensor) -> dict[str, Any]:
    """Llama 3.1 files hold the divisors that its scaling comes to. They are recognised, or taken as they are."""
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = _llama3_factors(metadata.number("rope.freq_base", 10000.0), len(factors), scaling)
    if torch.allclose(factors, expected, rtol=1e-3):
        return scaling
    longest = metadata.size("context_length")
    plain = factors.tolist()
    return {
        "rope_type": "longrope",
        "short_factor": plain,
        "long_factor": plain,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }


def _llama3_factors(theta: float, count: int, scaling: Mapping[str, Any]) -> torch.Tensor:
    wavelengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = ((turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])).clamp(0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).float()


def _longrope(metadata: Metadata) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for length in ("short", "long"):
        scaling[f"{length}_factor"] = metadata.tensors[f"rope_factors_{length}.weight"].read().float().tolist()
    if metadata.number("rope.scaling.attn_factor", None):
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    scaling["original_max_position_embeddings"] = metadata.size("rope.scaling.original_context_length")
    return scaling
