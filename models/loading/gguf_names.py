"""From GGUF's tensor names and layouts to those of the same checkpoint on the hub, as checkpoint rules.

Experts go straight to our own names: GGUF holds them stacked as we do, and the hub's names would take them apart first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda.models.checkpoint import Add, Drop, Rename, Reorder, Rule, Split, Transpose

Names = Mapping[str, str]
Config = Mapping[str, Any]

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
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
LLAMA = PRE_NORMS | ATTENTION | QK_NORM | MLP
PHI3 = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
PHI2 = ATTENTION | {"attn_norm": "input_layernorm", "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
STARCODER2 = PRE_NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_ROOT = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head"}
GPT_OSS = ATTENTION | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
MOE = {
    "ffn_gate_inp": "router",
    "ffn_gate_inp_shexp": "shared_gate",
    **{f"ffn_{p}_exps": f"experts.{p}" for p in ("gate", "up", "down")},
    **{f"ffn_{p}_shexp": f"shared.{p}" for p in ("gate", "up", "down")},
}
CONSUMED = tuple(Drop(f"{name}.weight") for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"))
"""Tensors that became part of the configuration."""


def _nothing(config: Config) -> tuple[Rule, ...]:
    return ()


@dataclass(frozen=True)
class Layout:
    """How an architecture's file differs from the hub's checkpoint.

    Attributes:
        layer, root: GGUF's words → the hub's, within a layer and outside.
        first: rules on GGUF's names, for what is not a matter of names.
        prefix: of the hub's layers.
    """

    layer: Names = field(default_factory=lambda: LLAMA)
    root: Names = field(default_factory=lambda: ROOT)
    first: Callable[[Config], tuple[Rule, ...]] = _nothing
    prefix: str = "model.layers"

    def rules(self, config: Config) -> tuple[Rule, ...]:
        roots = (Rename(f"{theirs}.{{t}}", f"{ours}.{{t}}") for theirs, ours in self.root.items())
        layers = (Rename(f"blk.{{i}}.{theirs}.{{t}}", f"{self.prefix}.{{i}}.{ours}.{{t}}") for theirs, ours in self.layer.items())
        experts = (Rename(f"blk.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.ff.{ours}.{{t}}") for theirs, ours in MOE.items())
        return (*CONSUMED, *self.first(config), *roots, *layers, *experts)


def gguf_rules(architecture: str, config: Config) -> tuple[Rule, ...]:
    """The rules of one of `gguf_config.ARCHITECTURES`; `config` is what `gguf_config` made."""
    return LAYOUTS.get(architecture, Layout()).rules(config)


def _rotary_rows(config: Config) -> tuple[Rule, ...]:
    """The two halves of each head lie interleaved, as ggml's rope for Llama wants them."""
    half = config["head_dim"] // 2
    counts = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return tuple(Reorder(f"blk.{{i}}.attn_{name}.{{t}}", (heads, half, 2), (0, 2, 1)) for name, heads in counts.items())


def _norms_without_one(config: Config) -> tuple[Rule, ...]:
    """Gemma's norms are stored as w + 1."""
    names = {**SANDWICH, **QK_NORM}
    return (Add("output_norm.weight", -1.0), *(Add(f"blk.{{i}}.{name}.weight", -1.0) for name in names))


def _turned(config: Config) -> tuple[Rule, ...]:
    """GPT-2's checkpoints hold matrices transposed, its GGUF files do not."""
    return tuple(Transpose(f"blk.{{i}}.{name}.weight") for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"))


def _unfused(config: Config) -> tuple[Rule, ...]:
    """Older files hold q, k and v in one."""
    return (Split("blk.{i}.attn_qkv.{t}", tuple(f"blk.{{i}}.attn_{p}.{{t}}" for p in "qkv")),)


def _head_norms(config: Config) -> tuple[Rule, ...]:
    """A norm for each head, stacked as we hold them; the hub has one tensor a head."""
    return tuple(Rename(f"blk.{{i}}.attn_{p}_norm.{{t}}", f"layers.{{i}}.mixer.{p}_norm.{{t}}") for p in "qk")


def _gpt_oss(config: Config) -> tuple[Rule, ...]:
    """The hub's second matrices are turned, and its rules will turn them back."""
    return (Rename("blk.{i}.attn_sinks.weight", "model.layers.{i}.self_attn.sinks"), Transpose("blk.{i}.ffn_down_exps.weight"))


LAYOUTS: Mapping[str, Layout] = {
    **dict.fromkeys(("llama", "smollm3", "granite", "granitemoe"), Layout(first=_rotary_rows)),
    "gemma": Layout(first=_norms_without_one),
    **dict.fromkeys(("gemma2", "gemma3"), Layout(SANDWICH | ATTENTION | QK_NORM | MLP, first=_norms_without_one)),
    "olmo2": Layout(AFTER | ATTENTION | QK_NORM | MLP),
    "phi2": Layout(PHI2, ROOT | {"output_norm": "model.final_layernorm"}, _unfused),
    "phi3": Layout(PRE_NORMS | PHI3),
    "starcoder2": Layout(STARCODER2),
    "stablelm": Layout(first=_head_norms),
    "gpt2": Layout(GPT2, GPT2_ROOT, _turned, "transformer.h"),
    "gpt-oss": Layout(GPT_OSS, first=_gpt_oss),
}
"""Those that are more than Llama's names."""
