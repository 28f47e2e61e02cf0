"""Tiny models, one for each kind of block, as the configurations that checkpoints carry."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def _tiny(model_type: str, architecture: str, **own: Any) -> dict[str, Any]:
    return {**_BASE, "model_type": model_type, "architectures": [architecture], **own}


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _gemma(model_type: str, architecture: str, **own: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {"sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    config = _tiny(model_type, architecture, hidden_activation="gelu_pytorch_tanh", **shared, **own)
    return _without(config, "hidden_act")


_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 256,
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

_BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "n_layer": 3,
    "n_head": 4,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_scaling": None,
}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_MULTIPLIERS = {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 4.0}

TINY: dict[str, dict[str, Any]] = {
    "grouped queries, rotation, gated feed-forward": _tiny("llama", "LlamaForCausalLM"),
    "as many kv heads as heads, tied embeddings": _tiny("llama", "LlamaForCausalLM", num_key_value_heads=4, tie_word_embeddings=True),
    "one kv head, llama3 rotation": _tiny("llama", "LlamaForCausalLM", num_key_value_heads=1, rope_scaling=_LLAMA3),
    "biases of q, k and v": _tiny("qwen2", "Qwen2ForCausalLM"),
    "norms of q and k": _tiny("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=True),
    "sandwich norms, soft caps, windows": _gemma("gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "windows with a rotation of their own": _gemma(
        "gemma3_text", "Gemma3ForCausalLM", layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    ),
    "stacked projections": _tiny("phi3", "Phi3ForCausalLM", sliding_window=None),
    "layers without positions": _tiny("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0], tie_word_embeddings=True),
    "layer norm, learned positions, plain feed-forward": _GPT2,
    "attention by distance": _BLOOM,
    "sublayers side by side, angles in pairs": _tiny("cohere", "CohereForCausalLM", layer_norm_eps=1e-5, tie_word_embeddings=True),
    "part of each head turned, two norms side by side": _without(
        _tiny("gpt_neox", "GPTNeoXForCausalLM", rotary_pct=0.5, layer_norm_eps=1e-5), "head_dim", "num_key_value_heads", "rms_norm_eps"
    ),
    "part of each head turned in pairs, stacked gate and up": _tiny("glm4", "Glm4ForCausalLM", partial_rotary_factor=0.5),
    "multipliers": _tiny("granite", "GraniteForCausalLM", **_MULTIPLIERS),
    "norms after sublayers, q and k normed over all heads": _tiny("olmo2", "Olmo2ForCausalLM"),
    "squared relu, layer norm with 1 + w": _tiny(
        "nemotron", "NemotronForCausalLM", hidden_act="relu2", norm_eps=1e-5, partial_rotary_factor=0.5
    ),
    "sinks, biased experts with a clamped gate": _tiny("gpt_oss", "GptOssForCausalLM", **_SINKS),
    "a shared expert with a gate": _tiny("qwen2_moe", "Qwen2MoeForCausalLM", **_SHARED),
    "mixture of experts": _tiny("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
"""Kind of block → config.json. Add a line when a family brings a block that no other has."""
