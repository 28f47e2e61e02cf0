"""GGUF metadata → the config.json that the same model has on the hub, so that families need to know one spelling only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.models.loading.gguf_tokens import end_tokens, token_id
from pagoda.quant.format import StoredTensor

Tensors = Mapping[str, StoredTensor]
_MISSING: Any = object()


class Metadata:
    """The metadata of one model file, read by key below its architecture's name."""

    def __init__(self, values: Mapping[str, Any], tensors: Tensors) -> None:
        self.values = values
        self.tensors = tensors
        self.architecture: str = values.get("general.architecture", "")

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """`<architecture>.<key>`. Raises `ModelError` when it is missing and there is no default."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if value is _MISSING:
            raise ModelError(f"the GGUF metadata lacks {self.architecture}.{key}; the file is incomplete, convert the model again")
        return value

    def scalar(self, key: str, default: Any = _MISSING) -> Any:
        """The same for a key that may hold one value per layer, which must then be equal."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise ModelError(f"{self.architecture}.{key} differs from layer to layer ({value}); this model type has one value")
            return value[0]
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors


def gguf_config(values: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The configuration of a model file as a config.json-like dict.

    Raises `ModelError` for an architecture that is not known, and where needed metadata is missing.
    """
    metadata = Metadata(values, tensors)
    maker = ARCHITECTURES.get(metadata.architecture)
    if maker is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"a GGUF file of architecture {metadata.architecture!r} was given; known are {known}; use the model's safetensors")
    config = maker(metadata)
    return config | {f"{name}_token_id": token for name in ("bos", "eos") if (token := token_id(values, name)) is not None}


def gguf_generation_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """End and begin tokens as a generation_config.json-like dict."""
    config: dict[str, Any] = {"eos_token_id": list(end_tokens(values))}
    bos = token_id(values, "bos")
    return config if bos is None else config | {"bos_token_id": bos}


def _decoder(metadata: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    """The keys that all but the oldest families share."""
    width, heads = metadata.get("embedding_length"), metadata.scalar("attention.head_count")
    head_dim = metadata.get("attention.key_length", width // heads)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": metadata.scalar("feed_forward_length"),
        "num_hidden_layers": metadata.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.scalar("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.get("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": float(metadata.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, head_dim),
        "vocab_size": _vocab_size(metadata),
        "hidden_act": "silu",
        "tie_word_embeddings": not metadata.has("output.weight"),
    }


def _vocab_size(metadata: Metadata) -> int:
    table = metadata.tensors.get("token_embd.weight")
    return table.shape[0] if table else metadata.get("vocab_size", len(metadata.values.get("tokenizer.ggml.tokens", ())))


def _rope_scaling(metadata: Metadata, head_dim: int) -> dict[str, Any] | None:
    if metadata.has("rope_freqs.weight"):
        return _frequency_factors(metadata, metadata.tensors["rope_freqs.weight"].read().float())
    if metadata.has("rope_factors_short.weight"):
        return _longrope(metadata)
    kind, factor = metadata.get("rope.scaling.type", "none"), metadata.get("rope.scaling.factor", None)
    # Old files name the linear factor alone.
    factor = factor or metadata.get("rope.scale_linear", None)
    if kind == "none" and factor in (None, 0.0, 1.0):
        return None
    scaling = {"rope_type": "linear" if kind == "none" else kind, "factor": float(factor or 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.get("rope.scaling.original_context_length", metadata.get("context_length"))
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if metadata.get(f"rope.scaling.{theirs}", None) is not None:
                scaling[ours] = metadata.get(f"rope.scaling.{theirs}")
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
    expected = _llama3_factors(float(metadata.get("rope.freq_base", 10000.0)), len(factors), scaling)
    if torch.allclose(factors, expected, rtol=1e-3):
        return scaling
    longest = metadata.get("context_length")
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
    if metadata.get("rope.scaling.attn_factor", None):
        scaling["attention_factor"] = metadata.get("rope.scaling.attn_factor")
    scaling["original_max_position_embeddings"] = metadata.get("rope.scaling.original_context_length")
    return scaling


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("expert_count", 0):
        experts = {"num_local_experts": metadata.get("expert_count"), "num_experts_per_tok": metadata.get("expert_used_count")}
        return _decoder(metadata, "MixtralForCausalLM", "mixtral") | experts
    biases = {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}
    return _decoder(metadata, "LlamaForCausalLM", "llama") | biases


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return _decoder(metadata, "Qwen2ForCausalLM", "qwen2")


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return _decoder(metadata, "Qwen3ForCausalLM", "qwen3") | {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return _decoder(metadata, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "num_experts": metadata.get("expert_count"),
        "num_experts_per_tok": metadata.get("expert_used_count"),
        "moe_intermediate_size": metadata.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.get("block_count")
    # Every fourth layer has no positions; the format has no key for it.
    with_rope = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    return _decoder(metadata, "SmolLM3ForCausalLM", "smollm3") | {"no_rope_layers": with_rope, "attention_bias": False, "mlp_bias": False}


def _gemma1(metadata: Metadata) -> dict[str, Any]:
    config = _decoder(metadata, "GemmaForCausalLM", "gemma")
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    return config | {"attention_bias": False}


def _gemma(metadata: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    config = _decoder(metadata, architecture, model_type)
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    # The largest models divide by the width per head; the format says so only in newer files.
    largest = metadata.get("block_count") in (46, 62)
    by_size = config["hidden_size"] / config["num_attention_heads"] if largest else config["head_dim"]
    scale = metadata.get("attention.scale", None)
    config["query_pre_attn_scalar"] = scale**-2 if scale else by_size
    config["sliding_window"] = metadata.get("attention.sliding_window")
    config["attn_logit_softcapping"] = metadata.get("attn_logit_softcapping", None)
    config["final_logit_softcapping"] = metadata.get("final_logit_softcapping", None)
    return config | {"attention_bias": False}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    config = _gemma(metadata, "Gemma2ForCausalLM", "gemma2")
    return config | {"layer_types": _alternating(config["num_hidden_layers"], 2)}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    config = _gemma(metadata, "Gemma3ForCausalLM", "gemma3_text")
    every = metadata.get("attention.sliding_window_pattern", 6)
    local = float(metadata.get("rope.freq_base_swa", 10000.0))
    return config | {"rope_local_base_freq": local, "layer_types": _alternating(config["num_hidden_layers"], every)}


def _alternating(layers: int, every: int | list[bool]) -> list[str]:
    slides = [bool((layer + 1) % every) for layer in range(layers)] if isinstance(every, int) else every
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _phi3(metadata: Metadata) -> dict[str, Any]:
    config = _decoder(metadata, "Phi3ForCausalLM", "phi3")
    config["sliding_window"] = metadata.get("attention.sliding_window", None) or None
    original = metadata.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    fraction = metadata.get("rope.dimension_count", config["head_dim"]) / config.pop("head_dim")
    return config | {"original_max_position_embeddings": original, "partial_rotary_factor": fraction}


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": metadata.get("embedding_length"),
        "n_layer": metadata.get("block_count"),
        "n_head": metadata.get("attention.head_count"),
        "n_inner": metadata.get("feed_forward_length"),
        "n_positions": metadata.get("context_length"),
        "layer_norm_epsilon": metadata.get("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "vocab_size": _vocab_size(metadata),
        "tie_word_embeddings": not metadata.has("output.weight"),
    }


ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
"""Architectures of GGUF files, each with the maker of its configuration."""
