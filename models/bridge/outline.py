"""A bridged model before its weights are read: its spec, its module without numbers, and the facts that the engine asks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pagoda.hal.errors import ConfigError, ModelError
from pagoda.hal.kv import DTYPE_BYTES
from pagoda.models.bridge.crossed import crossing_of, is_crossed, states_of
from pagoda.models.bridge.encoder import media_facts
from pagoda.models.bridge.kinds import answers_of, bridged_class, pooler_of
from pagoda.models.bridge.module import Module, body_paths, hollow_module
from pagoda.models.bridge.probe import first_position_of, longest_of, probe, widest_of
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.bridge.texts import kept_of
from pagoda.models.builder import Numerics
from pagoda.models.conversion import Wanted
from pagoda.models.model import ModelFacts
from pagoda.models.parallel.shard import Shard

log = logging.getLogger("pagoda.models")

LONGEST = 8192
"""Tokens of a text where the configuration sets no limit."""


def outline(config: Mapping[str, Any], dtype: str, wanted: Wanted, shard: Shard) -> tuple[BridgeSpec, Module]:
    """Of one rank. Raises `ModelError` where transformers has no such model or cannot build it, `ConfigError` where it cannot be split."""
    answers = answers_of(config, wanted)
    kind = bridged_class(config, answers)
    crossed = answers == "tokens" and is_crossed(kind)
    if answers == "tokens" and not crossed:
        try:
            return probe(config, dtype, shard)
        except ModelError as error:
            _one_rank(shard, str(error))
            log.warning("%s: so each text is computed again for every token, which is slow", error)
    _one_rank(shard, "it runs text by text")
    module = hollow_module(kind, config, dtype, None)
    settings = module.config.get_text_config(decoder=True if answers == "tokens" else None)
    widest = widest_of(module)
    width = len(module.config.id2label) if answers in ("scores", "token_scores") else int(getattr(settings, "hidden_size", widest))
    top = module.get_output_embeddings() if answers == "tokens" else None
    vocab = int(settings.vocab_size if top is None else top.weight.shape[0])
    longest = (longest_of(settings) or LONGEST) - first_position_of(module)
    crossing = crossing_of(module) if crossed else None
    body, top = next(iter(body_paths(module)), ("", "")) if answers == "tokens" and not crossed else ("", "")
    media = media_facts(module, body, width) if body else None
    first = first_position_of(module)
    return BridgeSpec(config, body, (), vocab, width, widest, longest, first, top, media, "texts", answers, crossing), module


def _one_rank(shard: Shard, why: str) -> None:
    if shard.world > 1:
        raise ConfigError(f"a model that runs through transformers cannot be split over {shard.world} ranks here ({why}); use 1")


def facts_of(spec: BridgeSpec, module: Module, architecture: str, numerics: Numerics, eos: tuple[int, ...], wanted: Wanted) -> ModelFacts:
    """What the engine asks of a bridged model."""
    pooler = pooler_of(spec.config, spec.answers, wanted)
    if pooler is not None and pooler.steps:
        raise ConfigError(f"{architecture} runs through transformers, which has no projections behind its vectors; use a model of a family")
    texts = spec.way == "texts" and pooler is None
    tensors = (*module.parameters(), *module.buffers())
    work = DTYPE_BYTES[numerics.dtype] * (8 * spec.width + 4 * spec.widest) + (4 * spec.vocab if texts else 0)
    caches = tuple(call.cache(numerics.kv_dtype) for call in spec.calls)
    return ModelFacts(
        architecture=architecture,
        vocab_size=spec.vocab,
        width=spec.width,
        max_positions=spec.max_positions,
        caches=(kept_of(spec.media), *states_of(spec)) if texts else caches,
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        work_bytes_per_token=work,
        eos_ids=eos,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        tasks=pooler.tasks if pooler is not None else ("generate",),
        pooler=pooler,
        whole_prompts=pooler is not None,
        media=spec.media,
        dtype=numerics.dtype,
        replayable=spec.way == "paged",
        encoder=spec.crossing.facts if spec.crossing is not None else None,
    )
