"""Phi 1 and 2: one layer norm for both sublayers, partial rotation, biases everywhere; Phi 3 and 4: Llama, q, k, v and gate, up fused."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import attention_of, change_layers, plain_names, renamed, split
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Norm, Residual


def phi(config: Config) -> DecoderSpec:
    config.require("qk_layernorm", False, None)
    norm = Norm("layer", config.number("layer_norm_eps", default=1e-5), bias=True)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        assert isinstance(layer.feed_forward, Mlp)
        ff = replace(layer.feed_forward, gated=False, up_bias=True, down_bias=True)
        return Layer(replace(attention, qkv_bias=True, out_bias=True), ff, norm, residual=Residual.PARALLEL)

    plain = change_layers(llama.spec(config), change)
    return replace(plain, norm=norm, head=replace(plain.head, bias=True))


def phi3(config: Config) -> DecoderSpec:
    config.ignore("original_max_position_embeddings")
    return llama.spec(config)


def phi_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    names = {"self_attn.dense": "mixer.o", "mlp.fc1": "ff.up", "mlp.fc2": "ff.down"}
    return (*plain_names(spec), Rename("model.final_layernorm.{t}", "norm.{t}"), *renamed(names))


def phi3_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = attention_of(spec)
    q, kv = (heads * attention.head_dim for heads in (attention.heads, attention.kv_heads))
    return (
        *plain_names(spec),
        split("layers.{i}.mixer.qkv", "layers.{i}.mixer", "qkv", (q, kv, kv)),
        split("layers.{i}.ff.gate_up", "layers.{i}.ff", ("gate", "up")),
    )


PHI = Family("phi", ("PhiForCausalLM",), ("phi",), phi, phi_rules)
PHI3 = Family("phi3", ("Phi3ForCausalLM",), ("phi3", "phi4_multimodal_text"), phi3, phi3_rules)
