"""OLMo 1 (norms without weights), 2 and 3 (norms after, q and k normed over the full width), OLMoE."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pagoda.models.checkpoint import Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import (
    attention_of,
    change_layers,
    experts_of,
    llama_rules,
    moe_names,
    plain_names,
    rms,
    rope,
    sparse,
    sparse_names,
    with_attention,
)
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Moe, Norm, QkNorm, Router

AFTER = {"post_attention_layernorm": "mixer_out", "post_feedforward_layernorm": "ff_out"}


def olmo(config: Config) -> DecoderSpec:
    norm, clip = Norm("layer", 1e-5, weight=False), config.number("clip_qkv", default=None)
    plain = with_attention(llama.spec(config), clip=clip)
    return replace(change_layers(plain, lambda _, layer, attention: replace(layer, mixer_in=norm, ff_in=norm)), norm=norm)


def olmo2(config: Config) -> DecoderSpec:
    norm = rms(config)

    def after(_: int, layer: Layer, attention: Attention) -> Layer:
        return Layer(replace(attention, qk_norm=QkNorm(norm, "full")), layer.feed_forward, mixer_out=norm, ff_out=norm)

    return change_layers(llama.spec(config), after)


def olmo3(config: Config) -> DecoderSpec:
    plain = olmo2(config)
    everywhere, local = (rope(config, attention_of(plain).head_dim, part=part) for part in ("full_attention", "sliding_attention"))
    if not config.has("rope_parameters"):
        local = replace(local, scaling=None)  # the older spelling scales full layers alone
    return change_layers(
        plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, position=local if attention.window else everywhere))
    )


def olmoe(config: Config) -> DecoderSpec:
    plain, clip = llama.spec(config), config.number("clip_qkv", default=None)
    moe = experts_of(config, plain, Router("softmax", renormalize=config.flag("norm_topk_prob", default=False)))
    return sparse(with_attention(plain, clip=clip, qk_norm=QkNorm(rms(config), "full")), moe)


def flex_olmo(config: Config) -> DecoderSpec:
    moe = olmoe(config).layers[0].feed_forward
    assert isinstance(moe, Moe)
    return sparse(olmo2(config), moe)


def flex_olmo_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*llama_rules(spec.head.tied, AFTER), *moe_names(spec))


FLEX_OLMO = Family("flex_olmo", ("FlexOlmoForCausalLM",), ("flex_olmo",), flex_olmo, flex_olmo_rules)
OLMO = Family("olmo", ("OlmoForCausalLM",), ("olmo",), olmo, plain_names)
OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), ("olmo2",), olmo2, partial(plain_names, norms=AFTER))
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), ("olmo3",), olmo3, partial(plain_names, norms=AFTER))
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), ("olmoe",), olmoe, sparse_names)
