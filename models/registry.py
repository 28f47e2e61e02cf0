"""Which family serves a configuration: by architecture, then by model type; plugins join through the entry-point group `pagoda.models`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pagoda.hal.errors import ModelError
from pagoda.models.conversion import AS_IT_IS, Wanted, as_asked, pooling_family
from pagoda.models.families.afmoe import AFMOE
from pagoda.models.families.baichuan import BAICHUAN
from pagoda.models.families.bart import BART_KIN
from pagoda.models.families.bart_kin import BART_KIN_MORE
from pagoda.models.families.bert import BEFORE, BERT, DATA2VEC, ELECTRA, ERNIE, ROBERTA
from pagoda.models.families.classic import CLASSIC
from pagoda.models.families.cohere import COHERE, COHERE2, COHERE2_MOE
from pagoda.models.families.colbert import COLBERT
from pagoda.models.families.distil import DISTIL
from pagoda.models.families.expert_kin import EXPERT_KIN
from pagoda.models.families.falcon import FALCON
from pagoda.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA
from pagoda.models.families.glm import GLM, GLM4
from pagoda.models.families.gpt2 import GPT2
from pagoda.models.families.gpt_first import GPT_FIRST
from pagoda.models.families.gpt_kin import GPT_KIN
from pagoda.models.families.gpt_neox import GPT_NEOX
from pagoda.models.families.gpt_oss import GPT_OSS
from pagoda.models.families.gptj import GPTJ
from pagoda.models.families.granite import GRANITE, GRANITE_MOE
from pagoda.models.families.latent import LATENT
from pagoda.models.families.llama import LLAMA
from pagoda.models.families.llama4 import LLAMA4
from pagoda.models.families.llama_kin import LLAMA_KIN
from pagoda.models.families.mimo import MIMO_V2
from pagoda.models.families.mixtral import MIXTRAL, PHI_MOE
from pagoda.models.families.moonshine import MOONSHINE
from pagoda.models.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from pagoda.models.families.phi import PHI
from pagoda.models.families.phi3 import PHI3
from pagoda.models.families.qwen import QWEN2, QWEN3
from pagoda.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from pagoda.models.families.recurrent_kin import RECURRENT_KIN
from pagoda.models.families.rope_encoders import ROPE_ENCODERS
from pagoda.models.families.routed import ROUTED
from pagoda.models.families.smollm3 import SMOLLM3
from pagoda.models.families.stablelm import STABLELM
from pagoda.models.families.starcoder2 import STARCODER2
from pagoda.models.families.t5 import T5_KIN
from pagoda.models.families.whisper import WHISPER_KIN
from pagoda.models.family import Family

GROUP = "pagoda.models"

BUILT_IN = (
    LLAMA, *LLAMA_KIN, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, GEMMA, GEMMA2, VAULT_GEMMA, GEMMA3, SMOLLM3, PHI, PHI3, GPT2, GPTJ, GPT_NEOX,
    GPT_OSS, MIXTRAL, GRANITE, GRANITE_MOE, OLMO, OLMO2, OLMO3, OLMOE, FLEX_OLMO, *ROUTED, COHERE, COHERE2, COHERE2_MOE,
    AFMOE, BAICHUAN, MIMO_V2, STABLELM, STARCODER2, GLM, GLM4,
    FALCON, *CLASSIC, *LATENT, *GPT_FIRST, *GPT_KIN, *EXPERT_KIN, *LLAMA4, PHI_MOE, *RECURRENT_KIN,
    BERT, ROBERTA, ELECTRA, ERNIE, DATA2VEC, *BEFORE, *COLBERT, *DISTIL, *ROPE_ENCODERS,
    *T5_KIN, *BART_KIN, *BART_KIN_MORE, *WHISPER_KIN, MOONSHINE,
)  # fmt: skip


@cache
def families() -> tuple[Family, ...]:
    """Every family here, plugins' first: each entry point is a callable that returns families."""
    return (*(family for point in entry_points(group=GROUP) for family in point.load()()), *BUILT_IN)


def tasks_of(architecture: str, model_type: str) -> tuple[str, ...] | None:
    """What an architecture is asked for; None where no family serves it."""
    known = next((family for family in families() if architecture in family.architectures), None)
    if known is not None and not known.pools:
        return ("generate",)
    if known is None and pooling_family(architecture, {"model_type": model_type}, families()) is None:
        return None
    return pooled_tasks(architecture)


def bridged_tasks(architecture: str) -> tuple[str, ...]:
    """The same of an architecture that transformers runs."""
    generates = architecture.endswith(("LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "WithLMHead"))
    pools = architecture.endswith(("Model", "Classification", "Encoder"))
    return pooled_tasks(architecture) if pools and not generates else ("generate",)


def pooled_tasks(architecture: str) -> tuple[str, ...]:
    """Of one that answers with vectors or scores."""
    ends = {"ForSequenceClassification": "classify", "ForTokenClassification": "token_classify", "RewardModel": "token_classify"}
    return next(((task,) for end, task in ends.items() if architecture.endswith(end)), ("embed",))


def find_family(config: Mapping[str, Any], wanted: Wanted = AS_IT_IS) -> Family:
    """The family of a config.json, in the use that is `wanted`. Raises `ModelError` naming what it asks for and what is here."""
    return as_asked(_family(config), config, wanted)


def _family(config: Mapping[str, Any]) -> Family:
    architectures, model_type = tuple(config.get("architectures") or ()), config.get("model_type")
    for name in architectures:
        for family in families():
            if name in family.architectures:
                return family
    for name in architectures:
        if (found := pooling_family(name, config, families())) is not None:
            return found
    if not architectures:
        for family in families():
            if model_type in family.model_types:
                return family
    known = ", ".join(sorted(name for family in families() for name in family.architectures))
    asked = ", ".join(architectures) or f"model_type {model_type!r}"
    raise ModelError(f"no model family serves {asked}; there are {known}; a plugin can add one under the entry-point group {GROUP}")
