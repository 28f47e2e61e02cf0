"""Granite: Llama with four multipliers; dense, and with routed experts stored fused."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule, Split
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, Embed, Mlp, Moe, Router


def spec(config: Config) -> DecoderSpec:
    plain = llama.spec(config)
    scale, residual = config.number("attention_multiplier"), config.number("residual_multiplier")
    scaled = change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, scale=scale), scale=residual))
    head = replace(plain.head, scale=1 / config.number("logits_scaling"))
    return replace(scaled, embed=Embed(scale=config.number("embedding_multiplier")), head=head)


def moe(config: Config) -> DecoderSpec:
    dense = spec(config)
    mlp = dense.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    experts = Moe(
        config.integer("num_local_experts"), config.integer("num_experts_per_tok"), mlp.hidden, Router("softmax_after"), mlp.activation
    )
    return change_layers(dense, lambda _, layer, attention: replace(layer, feed_forward=experts))


def moe_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    block = "layers.{i}.block_sparse_moe"
    return (
        *llama_rules(spec.head.tied),
        Split(f"{block}.input_linear.{{t}}", tuple(f"layers.{{i}}.ff.experts.{part}.{{t}}" for part in ("gate", "up")), dim=1),
        Rename(f"{block}.output_linear.{{t}}", "layers.{i}.ff.experts.down.{t}"),
        Rename(f"{block}.router.layer.{{t}}", "layers.{i}.ff.router.{t}"),
    )


GRANITE = Family("granite", ("GraniteForCausalLM",), ("granite",), spec, lambda spec: llama_rules(spec.head.tied))
GRANITE_MOE = Family("granitemoe", ("GraniteMoeForCausalLM",), ("granitemoe",), moe, moe_rules)
