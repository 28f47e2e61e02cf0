"""Phi 3 and 4: Llama whose checkpoints hold q, k, v and gate, up fused."""

from __future__ import annotations

from pagoda.models.checkpoint import Rule, Split
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Attention, DecoderSpec


def spec(config: Config) -> DecoderSpec:
    config.ignore("original_max_position_embeddings")
    return llama.spec(config)


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    attention = spec.layers[0].mixer
    assert isinstance(attention, Attention)
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return (
        *llama_rules(spec.head.tied),
        Split("layers.{i}.mixer.qkv.{t}", tuple(f"layers.{{i}}.mixer.{part}.{{t}}" for part in "qkv"), (q, kv, kv)),
        Split("layers.{i}.ff.gate_up.{t}", tuple(f"layers.{{i}}.ff.{part}.{{t}}" for part in ("gate", "up"))),
    )


PHI3 = Family(name="phi3", architectures=("Phi3ForCausalLM",), model_types=("phi3",), spec=spec, rules=rules)
