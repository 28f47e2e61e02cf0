"""GGUF metadata → the config.json that the same model has on the hub, so that families need to know one spelling only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagoda.hal.errors import ModelError
from pagoda.models.loading.gguf_metadata import Metadata, Tensors, decoder_config, vocab_size
from pagoda.models.loading.gguf_tokens import end_tokens, token_id


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


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("expert_count", 0):
        experts = {"num_local_experts": metadata.size("expert_count"), "num_experts_per_tok": metadata.size("expert_used_count")}
        return decoder_config(metadata, "MixtralForCausalLM", "mixtral") | experts
    biases = {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}
    return decoder_config(metadata, "LlamaForCausalLM", "llama") | biases


def _qwen2(metadata: Metadata) -> dict[str, Any]:
    return decoder_config(metadata, "Qwen2ForCausalLM", "qwen2")


def _qwen3(metadata: Metadata) -> dict[str, Any]:
    return decoder_config(metadata, "Qwen3ForCausalLM", "qwen3") | {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    bias = {"attention_bias": metadata.has("blk.0.attn_q.bias")}
    return decoder_config(metadata, "Qwen3MoeForCausalLM", "qwen3_moe") | bias | _experts(metadata) | {"norm_topk_prob": True}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    layers = metadata.layers
    # Every fourth layer has no positions; the format has no key for it.
    with_rope = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    return decoder_config(metadata, "SmolLM3ForCausalLM", "smollm3") | {
        "no_rope_layers": with_rope,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _gemma1(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "GemmaForCausalLM", "gemma")
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    return config | {"attention_bias": False}


def _gemma(metadata: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    config = decoder_config(metadata, architecture, model_type)
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    # The largest models divide by the width per head; the format says so only in newer files.
    largest = metadata.layers in (46, 62)
    by_size = config["hidden_size"] / config["num_attention_heads"] if largest else config["head_dim"]
    scale = metadata.number("attention.scale", None)
    config["query_pre_attn_scalar"] = scale**-2 if scale else by_size
    config["sliding_window"] = metadata.size("attention.sliding_window")
    config["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping", None)
    config["final_logit_softcapping"] = metadata.number("final_logit_softcapping", None)
    return config | {"attention_bias": False}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    config = _gemma(metadata, "Gemma2ForCausalLM", "gemma2")
    return config | {"layer_types": _alternating(config["num_hidden_layers"], 2)}


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    config = _gemma(metadata, "Gemma3ForCausalLM", "gemma3_text")
    every = metadata.get("attention.sliding_window_pattern", 6)
    local = metadata.number("rope.freq_base_swa", 10000.0)
    return config | {"rope_local_base_freq": local, "layer_types": _alternating(config["num_hidden_layers"], every)}


def _alternating(layers: int, every: int | list[bool]) -> list[str]:
    slides = [bool((layer + 1) % every) for layer in range(layers)] if isinstance(every, int) else every
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _phi3(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "Phi3ForCausalLM", "phi3")
    config["sliding_window"] = metadata.get("attention.sliding_window", None) or None
    original = metadata.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    share = _rotary_share(metadata, config.pop("head_dim"))
    return config | {"original_max_position_embeddings": original, "partial_rotary_factor": share}


def _gpt2(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": metadata.size("embedding_length"),
        "n_layer": metadata.layers,
        "n_head": metadata.size("attention.head_count"),
        "n_inner": metadata.size("feed_forward_length"),
        "n_positions": metadata.size("context_length"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "vocab_size": vocab_size(metadata),
        "tie_word_embeddings": not metadata.has("output.weight"),
    }


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    return decoder_config(metadata, "Qwen2MoeForCausalLM", "qwen2_moe") | {
        **_experts(metadata),
        "shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _olmo2(metadata: Metadata) -> dict[str, Any]:
    return decoder_config(metadata, "Olmo2ForCausalLM", "olmo2") | {"attention_bias": False}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    experts = {"num_experts": metadata.size("expert_count"), "num_experts_per_tok": metadata.size("expert_used_count")}
    return decoder_config(metadata, "OlmoeForCausalLM", "olmoe") | experts | {"attention_bias": False, "norm_topk_prob": False}


def _granite(metadata: Metadata) -> dict[str, Any]:
    moe = metadata.architecture == "granitemoe"
    config = decoder_config(metadata, *(("GraniteMoeForCausalLM", "granitemoe") if moe else ("GraniteForCausalLM", "granite")))
    if moe:
        config |= {"num_local_experts": metadata.size("expert_count"), "num_experts_per_tok": metadata.size("expert_used_count")}
    return config | {
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale"),
        "residual_multiplier": metadata.number("residual_scale"),
        "logits_scaling": metadata.number("logit_scale"),
        "attention_bias": False,
    }


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "Starcoder2ForCausalLM", "starcoder2")
    config["norm_epsilon"] = config.pop("layer_norm_eps")
    return config | {"hidden_act": "gelu_pytorch_tanh", "use_bias": metadata.has("blk.0.attn_q.bias")}


def _phi2(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "PhiForCausalLM", "phi") | {"hidden_act": "gelu_new"}
    return config | {"partial_rotary_factor": _rotary_share(metadata, config.pop("head_dim"))}


def _command_r(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "CohereForCausalLM", "cohere")
    normed = metadata.has("blk.0.attn_q_norm.weight")
    return config | {"logit_scale": metadata.number("logit_scale"), "use_qk_norm": normed, "attention_bias": False}


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "Cohere2ForCausalLM", "cohere2")
    types = _alternating(config["num_hidden_layers"], metadata.get("attention.sliding_window_pattern", 4))
    window = metadata.size("attention.sliding_window")
    return config | {"logit_scale": metadata.number("logit_scale"), "sliding_window": window, "layer_types": types, "attention_bias": False}


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "StableLmForCausalLM", "stablelm")
    return config | {
        "partial_rotary_factor": _rotary_share(metadata, config.pop("head_dim")),
        "use_qkv_bias": metadata.has("blk.0.attn_q.bias"),
        "use_parallel_residual": bool(metadata.get("use_parallel_residual", False)),
        "qk_layernorm": metadata.has("blk.0.attn_q_norm.weight"),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    config = decoder_config(metadata, "GptOssForCausalLM", "gpt_oss")
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False
    return config | {
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": _alternating(config["num_hidden_layers"], 2),
        "attention_bias": True,
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rotary_share(metadata: Metadata, head_dim: int) -> float:
    return metadata.size("rope.dimension_count", head_dim) / head_dim


ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi2": _phi2,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt-oss": _gpt_oss,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "granite": _granite,
    "granitemoe": _granite,
    "starcoder2": _starcoder2,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "stablelm": _stablelm,
}
"""Architectures of GGUF files, each with the maker of its configuration."""
