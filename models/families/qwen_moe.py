"""Qwen 2 and 3 with routed experts: on some layers, with a gated shared expert in 2."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule
from pagoda.models.config import Config
from pagoda.models.families.common import PROJECTIONS, change_layers, listed_experts, llama_rules
from pagoda.models.families.qwen import qwen2, qwen3
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec, Layer, Mlp, Moe, Router


def qwen2_moe(config: Config) -> DecoderSpec:
    plain = qwen2(config)
    bias = config.flag("qkv_bias", default=True)
    plain = change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, qkv_bias=bias)))
    return _sparse(config, plain, config.integer("shared_expert_intermediate_size"))


def qwen3_moe(config: Config) -> DecoderSpec:
    return _sparse(config, qwen3(config), None)


def _sparse(config: Config, plain: DecoderSpec, shared: int | None) -> DecoderSpec:
    mlp = plain.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    moe = Moe(
        config.integer("num_experts", "num_local_experts"),
        config.integer("num_experts_per_tok"),
        config.integer("moe_intermediate_size"),
        Router("softmax", renormalize=config.flag("norm_topk_prob", default=False)),
        mlp.activation,
        Mlp(shared, mlp.activation) if shared else None,
        shared_gate=shared is not None,
    )
    dense, step = config.list("mlp_only_layers", kind=int, default=()), config.integer("decoder_sparse_step", default=1)

    def change(i: int, layer: Layer, attention: Attention) -> Layer:
        return replace(layer, feed_forward=moe) if i not in dense and (i + 1) % step == 0 else layer

    return change_layers(plain, change)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    return (
        *llama_rules(spec.head.tied),
        Rename("layers.{i}.mlp.gate.{t}", "layers.{i}.ff.router.{t}"),
        Rename("layers.{i}.mlp.shared_expert_gate.{t}", "layers.{i}.ff.shared_gate.{t}"),
        Rename("layers.{i}.mlp.shared_expert.{p}_proj.{t}", "layers.{i}.ff.shared.{p}.{t}"),
        *listed_experts(spec, "mlp", PROJECTIONS),
    )


QWEN2_MOE = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), ("qwen2_moe",), qwen2_moe, rules)
QWEN3_MOE = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), qwen3_moe, rules)
