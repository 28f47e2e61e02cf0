"""Tensor names of GGUF files, which llama.cpp's converter gives to all architectures alike."""

from __future__ import annotations

from pagoda.models.checkpoint import Add, Drop, Rename, Reorder, Rule
from pagoda.models.spec import Attention, DecoderSpec

_LAYER = {
    "attn_norm": "mixer_in", "attn_q": "mixer.q", "attn_k": "mixer.k", "attn_v": "mixer.v", "attn_output": "mixer.o",
    "attn_q_norm": "mixer.q_norm", "attn_k_norm": "mixer.k_norm", "post_attention_norm": "mixer_out", "post_ffw_norm": "ff_out",
    "ffn_norm": "ff_in", "ffn_gate": "ff.gate", "ffn_up": "ff.up", "ffn_down": "ff.down", "ffn_gate_inp": "ff.router",
    "ffn_gate_exps": "ff.experts.gate", "ffn_up_exps": "ff.experts.up", "ffn_down_exps": "ff.experts.down",
}  # fmt: skip


def gguf_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Names alone."""
    return (
        *(Drop(f"rope_{x}.weight") for x in ("freqs", "factors_long", "factors_short")),
        *((Drop("output.weight"),) if spec.head.tied else (Rename("output.{t}", "head.{t}"),)),
        Rename("token_embd.{t}", "embed.{t}"),
        Rename("position_embd.weight", "embed.positions"),
        Rename("output_norm.{t}", "norm.{t}"),
        *(Rename(f"blk.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in _LAYER.items()),
    )


def gguf_rules_permuted(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Names, and the rotary rows of q and k in halves again: the converter stores them in pairs for the Llama line."""
    attention = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention))
    half = attention.head_dim // 2
    return (
        *gguf_rules(spec),
        Reorder("layers.{i}.mixer.q.{t}", (attention.heads, half, 2), (0, 2, 1)),
        Reorder("layers.{i}.mixer.k.{t}", (attention.kv_heads, half, 2), (0, 2, 1)),
    )


def gguf_rules_shifted(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Names, and norm weights as offsets from one again: the converter adds the one of Gemma's 1 + w."""
    norms = ("norm.weight", "layers.{i}.mixer_in.weight", "layers.{i}.mixer_out.weight", "layers.{i}.ff_in.weight", "layers.{i}.ff_out.weight")
    qk = ("layers.{i}.mixer.q_norm.weight", "layers.{i}.mixer.k_norm.weight")
    return (*gguf_rules(spec), *(Add(name, -1.0) for name in (*norms, *qk)))
