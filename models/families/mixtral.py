"""Mixtral: Mistral with routed experts; Phi 3.5 MoE: the same with layer norms and a router of its own."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import MIXTRAL_NAMES, change_layers, experts_of, moe_names, plain_names, sparse
from pagoda.models.family import Family
from pagoda.models.rope import LongRopeScaling, Rope
from pagoda.models.spec import Attention, DecoderSpec, Layer, Moe, Norm, Router


def spec(config: Config) -> DecoderSpec:
    dense = llama.spec(config)
    return sparse(dense, experts_of(config, dense, Router("softmax", renormalize=True)))


def phimoe(config: Config) -> DecoderSpec:
    config.ignore("input_jitter_noise")
    norm = Norm("layer", config.number("rms_norm_eps", default=1e-5), bias=True)
    router = Router("sparsemixer", jitter=config.number("router_jitter_noise", default=0.01))
    stretch = _stretch(config)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(layer.feed_forward, Moe)
        position = attention.position
        if isinstance(position, Rope) and isinstance(position.scaling, LongRopeScaling) and stretch is not None:
            position = replace(position, scaling=replace(position.scaling, attention_factor=stretch))
        return Layer(replace(attention, position=position), replace(layer.feed_forward, router=router), norm, ff_in=norm)

    plain = change_layers(spec(config), change)
    return replace(plain, norm=norm, head=replace(plain.head, bias=config.flag("lm_head_bias", default=False)))


def _stretch(config: Config) -> float | None:
    """What long ropes multiply cos and sin by; a factor that changes with the length is not implemented."""
    values = config.child("rope_parameters") or config.child("rope_scaling")
    if values is None or not values.has("short_mscale"):
        return None
    short = values.number("short_mscale")
    values.require("long_mscale", short)
    return short


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*plain_names(spec), *moe_names(spec, "block_sparse_moe", names=MIXTRAL_NAMES))


PHI_MOE = Family("phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), ("phimoe",), phimoe, rules)
MIXTRAL = Family("mixtral", ("MixtralForCausalLM",), ("mixtral",), spec, rules)
