"""Mamba, Falcon Mamba and Mamba 2: layers of one recurrent mixer and nothing else."""

from __future__ import annotations

from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.families.common import body_names, decoder
from pagoda.models.families.recurrent_common import ENDLESS, first_of, selective_rules, ssd_rules
from pagoda.models.family import Family
from pagoda.models.recurrent import Conv, GatedNorm, Recurrent, Selective, Ssd
from pagoda.models.spec import DecoderSpec, Layer, Norm


def mamba(config: Config) -> DecoderSpec:
    return _spec(config, _selective(config, None), tied=True)


def falcon_mamba(config: Config) -> DecoderSpec:
    norm = Norm("rms", config.number("mixer_rms_eps", default=1e-6), weight=False)
    return _spec(config, _selective(config, norm), tied=True)


def mamba2(config: Config) -> DecoderSpec:
    heads, head_dim, groups = config.integer("num_heads"), config.integer("head_dim"), config.integer("n_groups", default=8)
    eps = config.number("layer_norm_epsilon", default=1e-5)
    config.ignore("expand", "norm_before_gate", "rms_norm")
    mixer = Ssd(
        heads,
        head_dim,
        groups,
        config.integer("state_size"),
        _conv(config),
        GatedNorm(Norm("rms", eps), groups, gate_first=True),
        step_limits(config),
        config.flag("use_bias", default=False),
    )
    return _spec(config, mixer, tied=False)


def step_limits(config: Config, name: str = "time_step_limit") -> tuple[float, float]:
    """The pair, in which infinity may be spelled as a mapping or left out."""
    low, high = config.list(name, kind=(int, float, dict), default=(0.0, float("inf")))
    return float(low), float(high["__float__"]) if isinstance(high, dict) else float(high)


def _selective(config: Config, norm: Norm | None) -> Selective:
    width = config.integer("hidden_size")
    config.ignore("expand", "use_mambapy", "use_associative_scan", "use_falcon_mambapy")
    inner = config.integer("intermediate_size", default=config.integer("expand", default=2) * width)
    rank = config.integer("time_step_rank", default=-(-width // 16))
    bias = config.flag("use_bias", default=False)
    return Selective(inner, config.integer("state_size"), rank, _conv(config), inner_norm=norm, bias=bias)


def _conv(config: Config) -> Conv:
    return Conv(config.integer("conv_kernel", default=4), config.flag("use_conv_bias", default=True))


def _spec(config: Config, mixer: Recurrent, tied: bool) -> DecoderSpec:
    norm = Norm("rms", config.number("layer_norm_epsilon", default=1e-5))
    config.require("hidden_act", "silu", default="silu")
    config.ignore(
        "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_min",
        "time_step_rank", "time_step_scale", "chunk_size",
    )  # fmt: skip
    layers = (Layer(mixer, None, mixer_in=norm),) * config.integer("num_hidden_layers")
    return decoder(config, config.integer("hidden_size"), layers, norm, ENDLESS, tied=tied)


def _names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return body_names(spec, "backbone.embeddings", "backbone.norm_f", "backbone.layers", {"norm": "mixer_in"})


def selective_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*_names(spec), *selective_rules(first_of(spec, Selective), "layers.{i}.mixer"))


def ssd_names(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*_names(spec), *ssd_rules(first_of(spec, Ssd), "layers.{i}.mixer"))


MAMBA = Family("mamba", ("MambaForCausalLM",), ("mamba",), mamba, selective_names)
FALCON_MAMBA = Family("falcon_mamba", ("FalconMambaForCausalLM",), ("falcon_mamba",), falcon_mamba, selective_names)
MAMBA2 = Family("mamba2", ("Mamba2ForCausalLM",), ("mamba2",), mamba2, ssd_names)
