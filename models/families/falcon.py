"""Falcon 7B (one KV head, one norm), 40B and later (grouped heads, two norms), RW (ALiBi, sequential)."""

from __future__ import annotations

from pagoda.models.checkpoint import Drop, Rename, Reorder, Rule, Split
from pagoda.models.config import Config
from pagoda.models.families.common import activation, attention_of, interleaved_qkv, rope
from pagoda.models.family import Family
from pagoda.models.rope import Rope
from pagoda.models.spec import Alibi, Attention, DecoderSpec, Embed, Head, Layer, Mlp, Norm, Residual


def spec(config: Config) -> DecoderSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads", "n_head")
    norm, dim = Norm("layer", config.number("layer_norm_epsilon", default=1e-5), bias=True), width // heads
    grouped = config.flag("new_decoder_architecture", default=False)
    kv_heads = _kv_heads(config, heads, grouped)
    bias = config.flag("bias", default=False)
    # Its slopes are scaled with the products of q and k.
    position: Rope | Alibi = Alibi(scale=dim**-0.5) if config.flag("alibi", default=False) else rope(config, dim)
    config.ignore("rope_parameters", "rope_theta", "rope_scaling", "apply_residual_connection_post_layernorm")
    attention = Attention(heads, kv_heads, dim, dim**-0.5, position, qkv_bias=bias, out_bias=bias)
    hidden = config.integer("ffn_hidden_size", default=4 * width)
    ff = Mlp(hidden, activation(config, "activation", default="gelu"), gated=False, up_bias=bias, down_bias=bias)
    return DecoderSpec(
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(_layer(config, attention, ff, norm, grouped),) * config.integer("num_hidden_layers", "n_layer"),
        norm=norm,
        embed=Embed(),
        head=Head(tied=config.flag("tie_word_embeddings", default=True)),
        max_positions=config.integer("max_position_embeddings", default=2048),
    )


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
    norms = ("ln_attn", "ln_mlp") if two else ("input_layernorm", "post_attention_layernorm")
    names = {norms[0]: "mixer_in", norms[1]: "ff_in", "self_attention.dense": "mixer.o"}
    names |= {"mlp.dense_h_to_4h": "ff.up", "mlp.dense_4h_to_h": "ff.down"}
    return (
        *((Drop("lm_head.weight"),) if spec.head.tied else (Rename("lm_head.{t}", "head.{t}"),)),
        Rename("transformer.word_embeddings.{t}", "embed.{t}"),
        Rename("transformer.ln_f.{t}", "norm.{t}"),
        Rename("transformer.h.{x*}", "layers.{x*}"),
        *(Rename(f"layers.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
        *_qkv(spec, "layers.{i}.self_attention.query_key_value"),
    )


def _qkv(spec: DecoderSpec, name: str) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    heads, kv, dim = attention.heads, attention.kv_heads, attention.head_dim
    if kv == heads and spec.layers[0].ff_in is not None and spec.layers[0].residual is Residual.SEQUENTIAL:
        return interleaved_qkv(spec, name)
    group = heads // kv
    q, *others = (f"layers.{{i}}.mixer.{part}" for part in "qkv")
    return (
        Reorder(f"{name}.{{t}}", (kv, group + 2, dim), (1, 0, 2)),
        Split(f"{name}.{{t}}", tuple(f"{part}.{{t}}" for part in (q, *others)), (heads * dim, kv * dim, kv * dim)),
        Reorder(f"{q}.{{t}}", (group, kv, dim), (1, 0, 2)),
    )


FALCON = Family("falcon", ("FalconForCausalLM", "RWForCausalLM"), ("falcon",), spec, rules)
