"""StarCoder 2: layer norms, plain feed-forward, biases by configuration."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Norm


def spec(config: Config) -> DecoderSpec:
    norm, bias = Norm("layer", config.number("norm_epsilon", default=1e-5), bias=True), config.flag("use_bias", default=True)
    config.ignore("mlp_type", "norm_type")

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(layer.feed_forward, Mlp)
        ff = replace(layer.feed_forward, gated=False, up_bias=bias, down_bias=bias)
        return Layer(replace(attention, qkv_bias=bias, out_bias=bias), ff, norm, ff_in=norm)

    plain = change_layers(llama.spec(config), change)
    return replace(plain, norm=norm, head=replace(plain.head, tied=config.flag("tie_word_embeddings", default=True)))


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *llama_rules(spec.head.tied),
        Rename("layers.{i}.ff.c.{t}", "layers.{i}.ff.down.{t}"),
        Rename("layers.{i}.mlp.c_fc.{t}", "layers.{i}.ff.up.{t}"),
    )


STARCODER2 = Family("starcoder2", ("Starcoder2ForCausalLM",), ("starcoder2",), spec, rules)
