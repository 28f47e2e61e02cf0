"""GPT-OSS: attention sinks, alternating windows, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Reorder, Rule, Transpose
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules, mlp_of, split
from pagoda.models.family import Family
from pagoda.models.spec import Attention, ClampedSwiglu, DecoderSpec, Layer, Moe, Router


def spec(config: Config) -> DecoderSpec:
    plain = llama.spec(config)
    clamp = ClampedSwiglu(config.number("swiglu_alpha", default=1.702), config.number("swiglu_limit", default=7.0))
    experts, chosen = config.integer("num_local_experts"), config.integer("num_experts_per_tok", "experts_per_token")
    config.ignore("initial_context_length", "experts_per_token")
    moe = Moe(experts, chosen, mlp_of(plain).hidden, Router("softmax_after", bias=True), clamp, bias=True)

    def change(_: int, layer: Layer, attention: Attention) -> Layer:
        return replace(layer, mixer=replace(attention, sinks=True), feed_forward=moe)

    return change_layers(plain, change)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    moe = spec.layers[0].feed_forward
    assert isinstance(moe, Moe)
    ours, pairs = "layers.{i}.ff.experts", (moe.hidden, 2)
    return (
        *llama_rules(spec.head.tied),
        Rename("layers.{i}.self_attn.sinks", "layers.{i}.mixer.sinks"),
        Rename("layers.{i}.mlp.router.{t}", "layers.{i}.ff.router.{t}"),
        Rename("layers.{i}.mlp.experts.{p}_proj", f"{ours}.{{p}}.weight"),
        Rename("layers.{i}.mlp.experts.{p}_proj_bias", f"{ours}.{{p}}.bias"),
        Transpose(f"{ours}.gate_up.weight"),
        Transpose(f"{ours}.down.weight"),
        Reorder(f"{ours}.gate_up.{{t}}", pairs, (1, 0), dim=1),
        split(f"{ours}.gate_up", ours, ("gate", "up"), dim=1),
    )


GPT_OSS = Family("gpt_oss", ("GptOssForCausalLM",), ("gpt_oss",), spec, rules)
