"""Qwen3-Next: three layers of the gated delta rule to one of gated attention, experts on most."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from pagoda.models.checkpoint import Reorder, Rule, Split
from pagoda.models.config import Config
from pagoda.models.families.common import (
    Heads,
    activation,
    decoder,
    max_positions,
    moe_names,
    plain_names,
    renamed,
    rms,
    rope,
    split,
    woven,
)
from pagoda.models.families.recurrent_common import first_of, layer_kinds, rate_names
from pagoda.models.family import Family
from pagoda.models.recurrent import Conv, GatedDelta, GatedNorm
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Moe, QkNorm, Router

SECTIONS = (11, 11, 10)
LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_next(config: Config) -> DecoderSpec:
    width, count = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, norm = Heads.read(config, width), rms(config, offset=1.0)
    position = rope(config, heads.head_dim)
    attention = heads.attention(position, config.flag("attention_bias", default=False), qk_norm=QkNorm(norm), gated=True)
    every = config.integer("full_attention_interval", default=4)
    default = [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
    kinds = layer_kinds(config, count, (LINEAR, FULL), default=default)
    delta = gated_delta(config)
    layers = (
        Layer(delta if kind == LINEAR else attention, ff, mixer_in=norm, ff_in=norm)
        for kind, ff in zip(kinds, _feed_forwards(config, count), strict=True)
    )
    return decoder(config, width, layers, norm, max_positions(config, position.scaling))


def gated_delta(config: Config) -> GatedDelta:
    """The delta rule of Qwen3-Next and its kin: each head's output is normed, then gated."""
    heads = config.integer("linear_num_value_heads")
    return GatedDelta(
        heads,
        config.integer("linear_num_key_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        Conv(config.integer("linear_conv_kernel_dim", default=4)),
        GatedNorm(replace(rms(config), offset=0.0), heads, shared=True),
    )


def _feed_forwards(config: Config, count: int) -> tuple[Mlp | Moe, ...]:
    act = activation(config, "hidden_act")
    experts, step = config.integer("num_experts", default=0), config.integer("decoder_sparse_step", default=1)
    dense = config.list("mlp_only_layers", kind=int, default=())
    mlp = Mlp(config.integer("intermediate_size", default=1), act)
    if not experts:
        return (mlp,) * count
    router = Router("softmax", renormalize=config.flag("norm_topk_prob", default=True))
    shared = Mlp(config.integer("shared_expert_intermediate_size"), act)
    top_k, hidden = config.integer("num_experts_per_tok"), config.integer("moe_intermediate_size")
    moe = Moe(experts, top_k, hidden, router, act, shared, shared_gate=True)
    return tuple(moe if i not in dense and (i + 1) % step == 0 else mlp for i in range(count))


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*_names(spec), *(_packed(spec) if _delta(spec) else ()), *_delta_names(spec))


def _names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*plain_names(spec), *gated_q(spec), *_sparse_names(spec))


def _delta(spec: DecoderSpec) -> bool:
    """The layer that predicts several tokens has none."""
    return any(isinstance(layer.mixer, GatedDelta) for layer in spec.layers)


def gated_q(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Each head's query and gate lie side by side."""
    attending = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    q, gate = "layers.{i}.mixer.q.{t}", "layers.{i}.mixer.gate.{t}"
    return tuple(rule for a in attending[:1] for rule in (Reorder(q, (a.heads, 2, a.head_dim), (1, 0, 2)), Split(q, (q, gate))))


def _sparse_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return moe_names(spec, shared="shared_expert") if any(isinstance(layer.feed_forward, Moe) for layer in spec.layers) else ()


def _packed(spec: DecoderSpec) -> tuple[Rule, ...]:
    """q, k, v, gate of each key head side by side in one tensor; beta and step in another."""
    delta, at, to = first_of(spec, GatedDelta), "layers.{i}.linear_attn", "layers.{i}.mixer"
    share = delta.heads // delta.k_heads
    own, values = delta.k_dim, share * delta.v_dim
    unit, packed = gcd(own, values), f"{at}.in_proj_qkvz.{{t}}"
    names = tuple(f"{to}.{part}.{{t}}" for part in ("query", "key", "value", "z"))
    sizes = tuple(delta.k_heads * size for size in (own, own, values, values))
    return (
        Reorder(packed, (delta.k_heads, 2 * (own + values) // unit, unit), (1, 0, 2)),
        Split(packed, names, sizes),
        *(Reorder(name, (size // unit // delta.k_heads, delta.k_heads, unit), (1, 0, 2)) for name, size in zip(names, sizes, strict=True)),
        Reorder(f"{at}.in_proj_ba.{{t}}", (delta.k_heads, 2, share), (1, 0, 2)),
        split(f"{at}.in_proj_ba", to, ("beta", "step")),
    )


_MIXED = ("query", "key", "value")


def _mixed_sizes(spec: DecoderSpec) -> tuple[int, int, int]:
    delta = first_of(spec, GatedDelta)
    keys, values = delta.k_heads * delta.k_dim, delta.heads * delta.v_dim
    return keys, keys, values


def _delta_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    at, to = "layers.{i}.linear_attn", "layers.{i}.mixer"
    if not _delta(spec):
        return ()
    return (
        split(f"{at}.conv1d", f"{to}.conv", _MIXED, _mixed_sizes(spec)),
        *rate_names(at, to),
        *renamed({"norm": "norm", "out_proj": "out"}, at, to),
    )


def qwen3_5(config: Config) -> DecoderSpec:
    """Qwen 3.5's text model; positions with sections for media are plain ones in text."""
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "attn_output_gate", "mlp_only_layers", "output_gate_type")
    config.require("mamba_ssm_dtype", "float32", default="float32")
    return woven(qwen3_next(config), SECTIONS)


def apart_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Qwen 3.5: q, k, v in one tensor, gate, beta and step in their own."""
    at, to = "layers.{i}.linear_attn", "layers.{i}.mixer"
    return (
        *_names(spec),
        *((split(f"{at}.in_proj_qkv", to, _MIXED, _mixed_sizes(spec)),) if _delta(spec) else ()),
        *renamed({"in_proj_z": "z", "in_proj_b": "beta", "in_proj_a": "step"}, at, to),
        *_delta_names(spec),
    )


QWEN3_5 = Family("qwen3_5", ("Qwen3_5ForCausalLM",), ("qwen3_5_text",), qwen3_5, apart_rules)
QWEN3_5_MOE = Family("qwen3_5_moe", ("Qwen3_5MoeForCausalLM",), ("qwen3_5_moe_text",), qwen3_5, apart_rules)
QWEN3_NEXT = Family("qwen3_next", ("Qwen3NextForCausalLM",), ("qwen3_next",), qwen3_next, rules)
