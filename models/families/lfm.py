"""LFM 2: gated short convolutions, some layers of attention between them."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import (
    MIXTRAL_NAMES,
    Heads,
    correction,
    decoder,
    llama_rules,
    max_positions,
    moe_names,
    renamed,
    rope,
    split,
)
from pagoda.models.families.recurrent_common import layer_kinds
from pagoda.models.family import Family
from pagoda.models.recurrent import Conv, ShortConv
from pagoda.models.spec import DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm, Router


def lfm2(config: Config) -> DecoderSpec:
    return _spec(config, _hidden(config))


def _spec(config: Config, hidden: int) -> DecoderSpec:
    width, count = config.integer("hidden_size"), config.integer("num_hidden_layers")
    heads, norm = Heads.read(config, width), Norm("rms", config.number("norm_eps", "block_norm_eps", default=1e-5))
    position = rope(config, heads.head_dim, theta=1000000.0)
    attention = heads.attention(position, qk_norm=QkNorm(norm))
    bias = config.flag("conv_bias", default=False)
    conv = ShortConv(Conv(config.integer("conv_L_cache", default=3), bias), bias, width)
    mlp = Mlp(hidden, "silu")
    attending = config.list("full_attn_idxs", kind=int, default=tuple(range(count)))
    default = ["full_attention" if i in attending else "conv" for i in range(count)]
    kinds = layer_kinds(config, count, ("conv", "full_attention"), default=default)
    config.ignore("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_mlp_init_scale", "block_out_init_scale",
                  "block_use_swiglu", "block_use_xavier_init", "use_pos_enc", "num_heads", "theta")  # fmt: skip
    layers = (Layer(conv if kind == "conv" else attention, mlp, mixer_in=norm, ff_in=norm) for kind in kinds)
    tied = config.flag("tie_embedding", default=True)
    return decoder(config, width, layers, norm, max_positions(config, position.scaling), tied=tied)


def lfm2_moe(config: Config) -> DecoderSpec:
    dense, plain = config.integer("num_dense_layers", default=0), _spec(config, config.integer("intermediate_size"))
    router = Router(
        "sigmoid",
        config.flag("norm_topk_prob", default=True),
        correction=config.flag("use_expert_bias", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
    )
    moe = Moe(config.integer("num_experts"), config.integer("num_experts_per_tok"), config.integer("moe_intermediate_size"), router)
    layers = tuple(layer if i < dense else replace(layer, feed_forward=moe) for i, layer in enumerate(plain.layers))
    return replace(plain, layers=layers)


def _hidden(config: Config) -> int:
    """The width of the feed-forward; with `block_auto_adjust_ff_dim`, two thirds of it, stretched and rounded up."""
    hidden = config.integer("block_ff_dim", "intermediate_size")
    config.ignore("intermediate_size")
    stretch, multiple = config.number("block_ffn_dim_multiplier", default=1.0), config.integer("block_multiple_of", default=256)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return hidden
    hidden = int(stretch * int(2 * hidden / 3))
    return -(-hidden // multiple) * multiple


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        Rename("model.embedding_norm.{t}", "model.norm.{t}"),
        *llama_rules(spec.head.tied, {"operator_norm": "mixer_in", "ffn_norm": "ff_in"}),
        *renamed({f"self_attn.{part}_layernorm": f"mixer.{part}_norm" for part in "qk"}),
        Rename("layers.{i}.mixer.out.{t}", "layers.{i}.mixer.o.{t}"),
        *renamed(MIXTRAL_NAMES, "layers.{i}.feed_forward", "layers.{i}.ff"),
        split("layers.{i}.conv.in_proj", "layers.{i}.mixer", "bcx"),
        Rename("layers.{i}.conv.conv.{t}", "layers.{i}.mixer.conv.x.{t}"),
        Rename("layers.{i}.conv.out_proj.{t}", "layers.{i}.mixer.out.{t}"),
    )


def moe_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*rules(spec), correction("feed_forward.expert_bias"), *moe_names(spec, "feed_forward", names=MIXTRAL_NAMES))


LFM2_MOE = Family("lfm2_moe", ("Lfm2MoeForCausalLM",), ("lfm2_moe",), lfm2_moe, moe_rules)
LFM2 = Family("lfm2", ("Lfm2ForCausalLM",), ("lfm2",), lfm2, rules)
