"""Granite: Llama with four multipliers; dense, and with routed experts stored fused."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, experts_of, mlp_of, plain_names, sparse, split
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, Embed, Router


def spec(config: Config) -> DecoderSpec:
    plain = llama.spec(config)
    scale, residual = config.number("attention_multiplier"), config.number("residual_multiplier")
    scaled = change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, scale=scale), scale=residual))
    head = replace(plain.head, scale=1 / config.number("logits_scaling"))
    return replace(scaled, embed=Embed(scale=config.number("embedding_multiplier")), head=head)


def moe(config: Config, shared: int = 0) -> DecoderSpec:
    """`shared`: width of what runs beside the experts for every token."""
    dense = spec(config)
    beside = replace(mlp_of(dense), hidden=shared) if shared else None
    return sparse(dense, experts_of(config, dense, Router("softmax_after"), shared=beside))


def moe_rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (*plain_names(spec), *expert_names())


def expert_names() -> tuple[Rule, ...]:
    """Routed experts, gate and up in one tensor for all."""
    block = "layers.{i}.block_sparse_moe"
    return (
        split(f"{block}.input_linear", "layers.{i}.ff.experts", ("gate", "up"), dim=1),
        Rename(f"{block}.output_linear.{{t}}", "layers.{i}.ff.experts.down.{t}"),
        Rename(f"{block}.router.layer.{{t}}", "layers.{i}.ff.router.{t}"),
    )


def shared_names(to: str) -> tuple[Rule, ...]:
    """A dense feed-forward beside the experts, or in their place."""
    block = "layers.{i}.shared_mlp"
    return (split(f"{block}.input_linear", to, ("gate", "up")), Rename(f"{block}.output_linear.{{t}}", f"{to}.down.{{t}}"))


GRANITE = Family("granite", ("GraniteForCausalLM",), ("granite", "granite_docling_text"), spec, plain_names)
GRANITE_MOE = Family("granitemoe", ("GraniteMoeForCausalLM",), ("granitemoe",), moe, moe_rules)
