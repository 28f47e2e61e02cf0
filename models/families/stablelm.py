"""StableLM: layer norms, partial rotation, optional parallel residual."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Norm, Residual


def spec(config: Config) -> DecoderSpec:
    config.require("qk_layernorm", False, None)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)
    bias, parallel = config.flag("use_qkv_bias", default=False), config.flag("use_parallel_residual", default=False)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        mixer = replace(attention, qkv_bias=bias)
        if parallel:
            return Layer(mixer, layer.feed_forward, norm, residual=Residual.PARALLEL)
        return Layer(mixer, layer.feed_forward, norm, ff_in=norm)

    return replace(change_layers(llama.spec(config), change), norm=norm)


STABLELM = Family("stablelm", ("StableLmForCausalLM",), ("stablelm",), spec, lambda spec: llama_rules(spec.head.tied))
