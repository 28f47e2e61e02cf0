"""From GGUF's tensor names and layouts to those of the same checkpoint on the hub, as checkpoint rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.models.checkpoint import Add, Drop, Rename, Reorder, Rule, Transpose, Unstack

ROOT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {f"attn_{p}": f"self_attn.{p}_proj" for p in "qkv"} | {"attn_output": "self_attn.o_proj"}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {f"ffn_{p}": f"mlp.{p}_proj" for p in ("gate", "up", "down")}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_LAYER = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
CONSUMED = tuple(Drop(f"{name}.weight") for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"))
"""Tensors that became part of the configuration."""


def gguf_rules(architecture: str, config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules of one of `gguf_config.ARCHITECTURES`; `config` is what `gguf_config` made."""
    match architecture:
        case "llama" if config["model_type"] == "mixtral":
            return (*_rotary_rows(config), *_mixtral_experts(config), *_named(PRE_NORMS | ATTENTION))
        case "llama" | "smollm3":
            return (*_rotary_rows(config), *_named(PRE_NORMS | ATTENTION | MLP))
        case "qwen3moe":
            return (*_qwen_experts(config), *_named(PRE_NORMS | ATTENTION | QK_NORM))
        case "gemma":
            return (*_norms_without_one(PRE_NORMS), *_named(PRE_NORMS | ATTENTION | MLP))
        case "gemma2" | "gemma3":
            return (*_norms_without_one(SANDWICH), *_named(SANDWICH | ATTENTION | QK_NORM | MLP))
        case "phi3":
            fused = {
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            }
            return _named(PRE_NORMS | fused)
        case "gpt2":
            return _gpt2()
        case _:
            return _named(PRE_NORMS | ATTENTION | QK_NORM | MLP)


def _named(layer: Mapping[str, str], root: Mapping[str, str] = ROOT, prefix: str = "model.layers") -> tuple[Rule, ...]:
    roots = (Rename(f"{theirs}.{{t}}", f"{ours}.{{t}}") for theirs, ours in root.items())
    layers = (Rename(f"blk.{{i}}.{theirs}.{{t}}", f"{prefix}.{{i}}.{ours}.{{t}}") for theirs, ours in layer.items())
    return (*CONSUMED, *roots, *layers)


def _rotary_rows(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The two halves of each head lie interleaved, as ggml's rope for Llama wants them."""
    half = config["head_dim"] // 2
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return tuple(Reorder(f"blk.{{i}}.attn_{name}.{{t}}", (heads, half, 2), (0, 2, 1)) for name, heads in counts.items())


def _norms_without_one(norms: Mapping[str, str]) -> tuple[Rule, ...]:
    """Gemma's norms are stored as w + 1."""
    layer = (*norms, *QK_NORM)
    return (Add("output_norm.weight", -1.0), *(Add(f"blk.{{i}}.{name}.weight", -1.0) for name in layer))


def _mixtral_experts(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    layer = "model.layers.{i}.block_sparse_moe"
    names = {"gate": "w1", "down": "w2", "up": "w3"}
    return (
        Rename("blk.{i}.ffn_gate_inp.{t}", f"{layer}.gate.{{t}}"),
        *(_experts(f"ffn_{part}_exps", f"{layer}.experts.{{e}}.{name}", config["num_local_experts"]) for part, name in names.items()),
    )


def _qwen_experts(config: Mapping[str, Any]) -> tuple[Rule, ...]:
    layer = "model.layers.{i}.mlp"
    return (
        Rename("blk.{i}.ffn_gate_inp.{t}", f"{layer}.gate.{{t}}"),
        *(_experts(f"ffn_{part}_exps", f"{layer}.experts.{{e}}.{part}_proj", config["num_experts"]) for part in ("gate", "up", "down")),
    )


def _experts(stored: str, name: str, count: int) -> Rule:
    return Unstack(f"blk.{{i}}.{stored}.{{t}}", f"{name}.{{t}}", "e", count)


def _gpt2() -> tuple[Rule, ...]:
    root = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head"}
    turned = (Transpose(f"blk.{{i}}.{name}.weight") for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"))
    return (*turned, *_named(GPT2_LAYER, root, "transformer.h"))
