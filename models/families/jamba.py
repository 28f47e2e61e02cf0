"""Jamba: Mamba layers, a few of attention without positions between them, experts on some."""

from __future__ import annotations

from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.families.common import Heads, activation, decoder, moe_names, rms
from pagoda.models.families.recurrent_common import first_of, hybrid_names, layer_kinds, selective_rules
from pagoda.models.family import Family
from pagoda.models.recurrent import Conv, Selective
from pagoda.models.spec import DecoderSpec, Layer, Mlp, Moe, Router

_KINDS = ("mamba", "attention", "linear_attention", "full_attention")


def jamba(config: Config) -> DecoderSpec:
    width, count, norm = config.integer("hidden_size"), config.integer("num_hidden_layers"), rms(config)
    heads, act = Heads.read(config, width), activation(config, "hidden_act")
    rank = config.integer("mamba_dt_rank", default=-(-width // 16))
    selective = Selective(
        config.integer("mamba_expand", default=2) * width,
        config.integer("mamba_d_state", default=16),
        rank,
        Conv(config.integer("mamba_d_conv", default=4), config.flag("mamba_conv_bias", default=True)),
        inner_norm=norm,
        bias=config.flag("mamba_proj_bias", default=False),
    )
    attention, longest = heads.attention(), config.integer("max_position_embeddings", default=262144)
    mlp = Mlp(config.integer("intermediate_size"), act)
    moe = Moe(config.integer("num_experts"), config.integer("num_experts_per_tok"), mlp.hidden, Router("softmax"), act)
    config.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan", "sliding_window")
    period, offset = config.integer("expert_layer_period", default=2), config.integer("expert_layer_offset", default=1)
    mixers = {"mamba": selective, "linear_attention": selective, "attention": attention, "full_attention": attention}
    ffs = [moe if i % period == offset and moe.experts > 1 else mlp for i in range(count)]
    layers = (Layer(mixers[kind], ff, mixer_in=norm, ff_in=norm) for kind, ff in zip(_kinds(config, count), ffs, strict=True))
    return decoder(config, width, layers, norm, longest)


def _kinds(config: Config, count: int) -> tuple[str, ...]:
    period, offset = config.integer("attn_layer_period", default=8), config.integer("attn_layer_offset", default=4)
    default = ["attention" if i % period == offset else "mamba" for i in range(count)]
    return layer_kinds(config, count, _KINDS, "layers_block_type", "layer_types", default=default)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    sparse = any(isinstance(layer.feed_forward, Moe) for layer in spec.layers)
    return (
        *hybrid_names(spec),
        *(moe_names(spec, "feed_forward", "router") if sparse else ()),
        *selective_rules(first_of(spec, Selective), "layers.{i}.mamba"),
    )


JAMBA = Family("jamba", ("JambaForCausalLM",), ("jamba",), jamba, rules)
