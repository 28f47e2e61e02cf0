"""Falcon 7B (one KV head, one norm), 40B and later (grouped heads, two norms), RW (ALiBi, sequential)."""

from __future__ import annotations

from pagoda.models.checkpoint import Reorder, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import (
    Heads,
    activation,
    attention_of,
    body_names,
    decoder,
    fused_layer,
    interleaved_qkv,
    plain_mlp,
    rope,
    split,
)
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Alibi, Attention, DecoderSpec, Layer, Mlp, Norm, Residual


def spec(config: Config) -> DecoderSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads", "n_head")
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), width // heads
    grouped = config.flag("new_decoder_architecture", default=False)
    kv_heads = _kv_heads(config, heads, grouped)
    bias = config.flag("bias", default=False)
    # Its slopes are scaled with the products of q and k.
    position: Rope | Alibi = Alibi(scale=dim**-0.5) if config.flag("alibi", default=False) else rope(config, dim)
    config.ignore("rope_parameters", "rope_theta", "rope_scaling", "apply_residual_connection_post_layernorm")
    ff = plain_mlp(config.integer("ffn_hidden_size", default=4 * width), activation(config, "activation", default="gelu"), bias)
    layer = _layer(config, Heads(heads, kv_heads, dim).attention(position, bias), ff, norm, grouped)
    longest = config.integer("max_position_embeddings", default=2048)
    return decoder(config, width, (layer,) * config.integer("num_hidden_layers", "n_layer"), norm, longest, tied=True)


def _kv_heads(config: Config, heads: int, grouped: bool) -> int:
    given = config.integer("num_kv_heads", "n_head_kv", default=heads)
    if grouped:
        return given
    return 1 if config.flag("multi_query", default=True) else heads


def _layer(config: Config, attention: Attention, ff: Mlp, norm: Norm, grouped: bool) -> Layer:
    config.ignore("multi_query")
    norms = config.integer("num_ln_in_parallel_attn", default=2 if grouped else 1)
    parallel = config.flag("parallel_attn", default=True) or grouped
    if not parallel:
        return Layer(attention, ff, norm, ff_in=norm)
    return Layer(attention, ff, norm, None, norm if grouped and norms == 2 else None, None, Residual.PARALLEL)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    two = spec.layers[0].residual is Residual.PARALLEL and spec.layers[0].ff_in is not None
    names = fused_layer("self_attention")
    if two:
        names = {"ln_attn": "mixer_in", "ln_mlp": "ff_in", **{theirs: ours for theirs, ours in names.items() if "layernorm" not in theirs}}
    return (
        *body_names(spec, "transformer.word_embeddings", "transformer.ln_f", "transformer.h", names),
        *_qkv(spec, "layers.{i}.self_attention.query_key_value"),
    )


def _qkv(spec: DecoderSpec, name: str) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    heads, kv, dim = attention.heads, attention.kv_heads, attention.head_dim
    if kv == heads and spec.layers[0].ff_in is not None and spec.layers[0].residual is Residual.SEQUENTIAL:
        return interleaved_qkv(spec, name)
    group = heads // kv
    return (
        Reorder(f"{name}.{{t}}", (kv, group + 2, dim), (1, 0, 2)),
        split(name, "layers.{i}.mixer", "qkv", (heads * dim, kv * dim, kv * dim)),
        Reorder("layers.{i}.mixer.q.{t}", (group, kv, dim), (1, 0, 2)),
    )


FALCON = Family("falcon", ("FalconForCausalLM", "RWForCausalLM"), ("falcon",), spec, rules)
