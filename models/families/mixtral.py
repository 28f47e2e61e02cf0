"""Mixtral: Mistral with routed experts."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rename, Rule, Stack
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import DecoderSpec, Mlp, Moe, Router


def spec(config: Config) -> DecoderSpec:
    dense = llama.spec(config)
    mlp = dense.layers[0].feed_forward
    assert isinstance(mlp, Mlp)
    experts, chosen = config.integer("num_local_experts"), config.integer("num_experts_per_tok")
    moe = Moe(experts, chosen, mlp.hidden, Router("softmax", renormalize=True), mlp.activation)
    return replace(dense, layers=tuple(replace(layer, feed_forward=moe) for layer in dense.layers))


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    moe = spec.layers[0].feed_forward
    assert isinstance(moe, Moe)
    block = "layers.{i}.block_sparse_moe"
    return (
        *llama_rules(spec.head.tied),
        *(
            Stack(f"{block}.experts.{{e}}.{theirs}.{{t}}", f"layers.{{i}}.ff.experts.{ours}.{{t}}", "e", moe.experts)
            for theirs, ours in {"w1": "gate", "w2": "down", "w3": "up"}.items()
        ),
        Rename(f"{block}.gate.{{t}}", "layers.{i}.ff.router.{t}"),
    )


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    model_types=("mixtral",),
    spec=spec,
    rules=rules,
)
