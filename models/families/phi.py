"""Phi 1 and 2: one layer norm for both sublayers, partial rotation, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Norm, Residual


def spec(config: Config) -> DecoderSpec:
    config.require("qk_layernorm", False, None)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(layer.feed_forward, Mlp)
        ff = replace(layer.feed_forward, gated=False, up_bias=True, down_bias=True)
        return Layer(replace(attention, qkv_bias=True, out_bias=True), ff, norm, residual=Residual.PARALLEL)

    plain = change_layers(llama.spec(config), change)
    return replace(plain, norm=norm, head=replace(plain.head, bias=True))


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"self_attn.dense": "mixer.o", "mlp.fc1": "ff.up", "mlp.fc2": "ff.down"}
    return (
        *llama_rules(spec.head.tied),
        Rename("model.final_layernorm.{t}", "norm.{t}"),
        *(Rename(f"layers.{{i}}.{theirs}.{{t}}", f"layers.{{i}}.{ours}.{{t}}") for theirs, ours in names.items()),
    )


PHI = Family("phi", ("PhiForCausalLM",), ("phi",), spec, rules)
