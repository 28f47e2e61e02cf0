"""MiMo V2: sliding layers with sinks, twice the KV heads and a rotation of their own; values narrower than keys; routed experts."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Drop, Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, rope
from pagoda.models.families.routed import grouped, routed_rules, sparse
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer


def spec(config: Config) -> DecoderSpec:
    """The configuration as transformers 5 writes it."""
    config.ignore("sliding_window_size", "num_local_experts")
    plain, v_dim = llama.spec(config), config.integer("v_head_dim", default=None)
    scale = config.number("attention_value_scale", default=1.0)
    kinds = config.list("mlp_layer_types", kind=str, default=("dense", *("sparse",) * (len(plain.layers) - 1)))

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        slides = attention.window is not None
        part = "sliding_attention" if slides else "full_attention"
        mixer = replace(
            attention,
            kv_heads=attention.kv_heads * (2 if slides else 1),
            position=rope(config, attention.head_dim, part=part),
            sinks=slides,
            out_bias=False,
            v_dim=v_dim,
            v_scale=scale,
        )
        return replace(layer, mixer=mixer)

    dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
    return sparse(change_layers(plain, change), grouped(config, plain), dense)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    """Layers that predict several tokens at once are dropped."""
    sinks = Rename("layers.{i}.self_attn.attention_sink_bias", "layers.{i}.mixer.sinks")
    return (Drop("model.mtp.{x*}"), *routed_rules(spec), sinks)


MIMO_V2 = Family("mimo_v2_flash", ("MiMoV2FlashForCausalLM",), ("mimo_v2_flash",), spec, rules)
