"""OLMo 1 (norms without weights), 2 and 3 (norms after, q and k normed over the full width), OLMoE."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import PROJECTIONS, change_layers, listed_experts, llama_rules, rms, rope
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Moe, Norm, QkNorm, Router

AFTER = {"post_attention_layernorm": "mixer_out", "post_feedforward_layernorm": "ff_out"}


def olmo(config: Config) -> DecoderSpec:
    norm, clip = Norm("layer", 1e-5, weight=False), config.number("clip_qkv", default=None)
    return replace(
        change_layers(
            llama.spec(config), lambda _, layer, attention: Layer(replace(attention, clip=clip), layer.feed_forward, norm, ff_in=norm)
        ),
        norm=norm,
    )


def olmo2(config: Config) -> DecoderSpec:
    norm = rms(config)

    def after(_: int, layer: Layer, attention: Attention) -> Layer:
        return Layer(replace(attention, qk_norm=QkNorm(norm, "full")), layer.feed_forward, mixer_out=norm, ff_out=norm)

    return change_layers(llama.spec(config), after)


def olmo3(config: Config) -> DecoderSpec:
    plain = olmo2(config)
    head_dim = plain.layers[0].mixer.head_dim if plain.layers[0].mixer else 0
    everywhere, local = (rope(config, head_dim, part=part) for part in ("full_attention", "sliding_attention"))
    if not config.has("rope_parameters"):
        local = replace(local, scaling=None)  # the older spelling scales full layers alone
    return change_layers(
        plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, position=local if attention.window else everywhere))
    )


def olmoe(config: Config) -> DecoderSpec:
    plain, clip = llama.spec(config), config.number("clip_qkv", default=None)
    mlp = plain.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    router = Router("softmax", renormalize=config.flag("norm_topk_prob", default=False))
    moe = Moe(config.integer("num_experts"), config.integer("num_experts_per_tok"), mlp.hidden, router, mlp.activation)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        return replace(layer, mixer=replace(attention, clip=clip, qk_norm=QkNorm(rms(config), "full")), feed_forward=moe)

    return change_layers(plain, change)


def olmoe_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    router = Rename("layers.{i}.mlp.gate.{t}", "layers.{i}.ff.router.{t}")
    return (*llama_rules(spec.head.tied), router, *listed_experts(spec, "mlp", PROJECTIONS))


def flex_olmo(config: Config) -> DecoderSpec:
    moe = olmoe(config).layers[0].feed_forward
    return change_layers(olmo2(config), lambda _, layer, attention: replace(layer, feed_forward=moe))


def flex_olmo_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    router = Rename("layers.{i}.mlp.gate.{t}", "layers.{i}.ff.router.{t}")
    return (*llama_rules(spec.head.tied, AFTER), router, *listed_experts(spec, "mlp", PROJECTIONS))


FLEX_OLMO = Family("flex_olmo", ("FlexOlmoForCausalLM",), ("flex_olmo",), flex_olmo, flex_olmo_rules)
OLMO = Family("olmo", ("OlmoForCausalLM",), ("olmo",), olmo, lambda spec: llama_rules(spec.head.tied))
OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), ("olmo2",), olmo2, lambda spec: llama_rules(spec.head.tied, AFTER))
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), ("olmo3",), olmo3, lambda spec: llama_rules(spec.head.tied, AFTER))
OLMOE = Family("olmoe", ("OlmoeForCausalLM",), ("olmoe",), olmoe, olmoe_rules)
