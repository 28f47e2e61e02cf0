"""GGUF metadata → the config.json that the same model has on the hub, so that families need to know one spelling only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Architecture:
    """How metadata become a config.json.

    Attributes:
        name, model_type: as there.
        sizes, numbers: its keys → those of the metadata that hold them; numbers that are missing are null.
        tensors: its keys → the tensors whose presence they tell.
        fixed: what a file does not say.
        more: changes what came of all this; what it gives comes on top.
    """

    name: str
    model_type: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Metadata, dict[str, Any]], Mapping[str, Any]] = lambda _, __: {}

    def config(self, metadata: Metadata) -> dict[str, Any]:
        """Raises `ModelError` where a size is missing."""
        made = decoder_config(metadata, self.name, self.model_type)
        made |= {key: metadata.size(name) for key, name in self.sizes.items()}
        made |= {key: metadata.number(name, None) for key, name in self.numbers.items()}
        made |= {key: metadata.has(name) for key, name in self.tensors.items()}
        made |= self.fixed
        more = self.more(metadata, made)
        return made | more


def _smollm3(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    # Every fourth layer has no positions; the format has no key for it.
    return {"no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(metadata.layers)]}


def _gemma(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    # The largest models divide by the width per head; the format says so only in newer files.
    largest = metadata.layers in (46, 62)
    by_size = made["hidden_size"] / made["num_attention_heads"] if largest else made["head_dim"]
    scale = metadata.number("attention.scale", None)
    every = 2 if made["model_type"] == "gemma2" else metadata.get("attention.sliding_window_pattern", 6)
    local = {} if made["model_type"] == "gemma2" else {"rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0)}
    return {"query_pre_attn_scalar": scale**-2 if scale else by_size, "layer_types": _alternating(metadata.layers, every), **local}


def _alternating(layers: int, every: int | list[bool]) -> list[str]:
    slides = [bool((layer + 1) % every) for layer in range(layers)] if isinstance(every, int) else every
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _partial(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    """A part of each head turns."""
    dim = made.pop("head_dim")
    return {"partial_rotary_factor": metadata.size("rope.dimension_count", dim) / dim}


def _phi3(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    original = metadata.size("rope.scaling.original_context_length", made["max_position_embeddings"])
    window = metadata.get("attention.sliding_window", None) or None
    return {**_partial(metadata, made), "sliding_window": window, "original_max_position_embeddings": original}


def _starcoder2(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    return {"norm_epsilon": made.pop("layer_norm_eps")}


def _cohere2(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": _alternating(metadata.layers, metadata.get("attention.sliding_window_pattern", 4))}


def _stablelm(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    return {**_partial(metadata, made), "use_parallel_residual": bool(metadata.get("use_parallel_residual", False))}


def _gpt_oss(metadata: Metadata, made: dict[str, Any]) -> dict[str, Any]:
    if made["rope_scaling"] is not None:
        made["rope_scaling"]["truncate"] = False
    return {"layer_types": _alternating(metadata.layers, 2)}


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


def _llama(metadata: Metadata) -> dict[str, Any]:
    return (_MIXTRAL if metadata.get("expert_count", 0) else _LLAMA).config(metadata)


_FEW = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_MANY = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_SIZED = {**_MANY, "moe_intermediate_size": "expert_feed_forward_length"}
_EVERY = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_WINDOW = {"sliding_window": "attention.sliding_window"}
_BIAS, _NORM = "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"
_PLAIN = {"attention_bias": False}
_TANH = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", **_PLAIN}
_CAPS = {f"{name}_softcapping": f"{name}_softcapping" for name in ("attn_logit", "final_logit")}
_SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}  # fmt: skip
_LLAMA = Architecture("LlamaForCausalLM", "llama", tensors={"attention_bias": _BIAS, "mlp_bias": "blk.0.ffn_up.bias"})
_MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", _FEW)
_SHARED = {**_SIZED, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_QWEN_MOE = Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _SHARED, fixed={**_EVERY, "norm_topk_prob": False})
_STABLELM = {"use_qkv_bias": _BIAS, "qk_layernorm": _NORM}
_GPT_OSS = {"intermediate_size": "expert_feed_forward_length", **_FEW, **_WINDOW}

ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2").config,
    "qwen2moe": _QWEN_MOE.config,
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", tensors={"attention_bias": _BIAS}).config,
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", _SIZED, tensors={"attention_bias": _BIAS}, fixed={**_EVERY, "norm_topk_prob": True}
    ).config,
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", fixed={**_PLAIN, "mlp_bias": False}, more=_smollm3).config,
    "gemma": Architecture("GemmaForCausalLM", "gemma", fixed=_TANH).config,
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _WINDOW, _CAPS, fixed=_TANH, more=_gemma).config,
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _WINDOW, _CAPS, fixed=_TANH, more=_gemma).config,
    "phi2": Architecture("PhiForCausalLM", "phi", fixed={"hidden_act": "gelu_new"}, more=_partial).config,
    "phi3": Architecture("Phi3ForCausalLM", "phi3", more=_phi3).config,
    "gpt2": _gpt2,
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS, fixed={"attention_bias": True}, more=_gpt_oss).config,
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", fixed=_PLAIN).config,
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", _MANY, fixed={**_PLAIN, "norm_topk_prob": False}).config,
    "granite": Architecture("GraniteForCausalLM", "granite", numbers=_SCALES, fixed=_PLAIN).config,
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", _FEW, _SCALES, fixed=_PLAIN).config,
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", "starcoder2", tensors={"use_bias": _BIAS}, fixed={"hidden_act": "gelu_pytorch_tanh"}, more=_starcoder2
    ).config,
    "command-r": Architecture(
        "CohereForCausalLM", "cohere", numbers={"logit_scale": "logit_scale"}, tensors={"use_qk_norm": _NORM}, fixed=_PLAIN
    ).config,
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", _WINDOW, {"logit_scale": "logit_scale"}, fixed=_PLAIN, more=_cohere2).config,
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", tensors=_STABLELM, more=_stablelm).config,
}
"""Architectures of GGUF files, each with the maker of its configuration."""
