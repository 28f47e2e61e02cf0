"""Baichuan 1 and 2: Llama with q, k and v in one tensor; the larger one has linear biases, the second the unit rows of its head."""

from __future__ import annotations

from dataclasses import replace

from pagoda.models.checkpoint import Rule, Split, UnitRows
from pagoda.models.config import Config
from pagoda.models.families import llama
from pagoda.models.families.common import change_layers, llama_rules
from pagoda.models.family import Family
from pagoda.models.spec import Alibi, DecoderSpec

SECOND = 125696
"""Vocabulary of Baichuan 2, the only thing that tells it from the first."""


def spec(config: Config) -> DecoderSpec:
    """A configuration with rotary positions says `max_position_embeddings`, one with linear biases only `model_max_length`."""
    config.ignore("z_loss_weight", "_from_model_config", "model_max_length")
    if config.has("max_position_embeddings"):
        return llama.spec(config)
    longest = {"max_position_embeddings": config.integer("model_max_length", default=4096)}
    plain = llama.spec(config.having(longest))
    return change_layers(plain, lambda _, layer, attention: replace(layer, mixer=replace(attention, position=Alibi())))


def rules(spec: DecoderSpec) -> tuple[Rule, ...]:
    parts = tuple(f"layers.{{i}}.mixer.{part}.{{t}}" for part in "qkv")
    unit = (UnitRows("lm_head.weight"),) if spec.vocab == SECOND else ()
    return (*unit, Split("model.layers.{i}.self_attn.W_pack.{t}", parts), *llama_rules(spec.head.tied))


BAICHUAN = Family("baichuan", ("BaichuanForCausalLM", "BaiChuanForCausalLM"), ("baichuan",), spec, rules)
