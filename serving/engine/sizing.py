"""How large everything will be, before a byte is loaded: weights, work, pages, and the longest sequence that they allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagoda.hal.errors import CapacityError, ConfigError
from pagoda.hal.info import Feature
from pagoda.hal.kv import DTYPE_BYTES, CacheGroup, CacheKind
from pagoda.hal.memory import MemoryPlan, MemoryRequest
from pagoda.models.adapters.slots import LoraLimits
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.conversion import Wanted
from pagoda.models.load import Description, describe, open_checkpoint, page_sizes
from pagoda.models.loading.reference import resolve
from pagoda.models.media import MediaFacts
from pagoda.models.model import ModelFacts
from pagoda.models.parallel.shard import Shard
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.embeddings import store_rows
from pagoda.serving.engine.groups import peak_pages, resolve_groups
from pagoda.serving.engine.layout import HEADER_WORDS
from pagoda.serving.engine.sampler import OPS, masks_inside, sampling_facts
from pagoda.serving.engine.target import Target

SHARED_KV_BYTES = 4 * 2**30
"""Pool size, when none is asked for, on devices whose memory is the host's: pages are touched as they are used, and others live there."""

SAMPLING_BYTES = 32
"""Bytes per logit of a step at the peak of sampling: the logits, their order, probabilities and what is kept."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one rank.

    Attributes:
        description: the model. groups: cache groups with one aligned `page_bytes`. padding: share of a page's bytes that hold nothing.
        work: bytes of the largest step, by what they are for.
        memory: where the device's bytes go. num_pages: pages of the pool, page 0 included.
        longest: the longest sequence that this pool can hold, whatever the model says.
        max_model_len: of a sequence.
    """

    description: Description
    groups: tuple[CacheGroup, ...]
    padding: float
    work: dict[str, int]
    memory: MemoryPlan
    num_pages: int
    longest: int
    max_model_len: int


def describe_model(config: EngineConfig, target: Target, rank: int = 0) -> Description:
    """The model of one rank. Raises `ConfigError`, `ModelError`, `CheckpointError`."""
    checkpoint = open_checkpoint(resolve(config.model, config.revision, cache=config.download_dir), config.load_format, config.hf_overrides)
    description = describe(
        checkpoint,
        dtype=config.dtype,
        kv_dtype=config.kv_cache_dtype,
        dtypes=target.info.dtypes,
        default=target.info.default_dtype,
        shard=Shard(rank, target.ranks),
        quantization=config.quantization,
        table=target.table,
        model_impl=config.model_impl,
        lora=LoraLimits(config.max_loras, config.max_lora_rank) if config.enable_lora else None,
        wanted=Wanted(config.runner, config.convert, config.pooler_config or {}),
    )
    inside = masks_inside(target.table, description.facts.vocab_size)
    for op in (*OPS, *(("masked_sample",) if inside else ())):
        target.table.choose(op, sampling_facts(description.facts.vocab_size))
    return description


def in_whole_steps(config: EngineConfig, description: Description) -> EngineConfig:
    """The configuration with steps that take the longest prompt, for models that cannot be given a part of one."""
    if not description.facts.whole_prompts:
        return config
    longest = config.max_model_len or description.facts.max_positions
    return replace(config, max_num_batched_tokens=max(config.max_num_batched_tokens, longest), enable_chunked_prefill=False)


def size(config: EngineConfig, target: Target, description: Description) -> Sizes:
    """Plan the memory of one rank. Raises `CapacityError` naming what is too big and what would fit."""
    _check_positions(config, description)
    embeds_width(config, description)
    groups, padding = cache_groups(config, target, description)
    work = _work(config, description, groups, target)
    memory = target.device.memory.plan(_request(config, target, description, groups, work))
    num_pages = memory.num_pages
    _check_step(num_pages)
    longest = longest_sequence(groups, num_pages, config.max_num_batched_tokens * _depth(config))
    return Sizes(description, groups, padding, work, memory, num_pages, longest, _max_model_len(config, description, longest))


def media_of(config: EngineConfig, facts: ModelFacts) -> MediaFacts | None:
    """What requests may bring beside tokens. Raises `ConfigError` where that is to be embeddings and the model takes none."""
    if not config.enable_prompt_embeds:
        return facts.media
    why = "answers with vectors or scores" if facts.pooler is not None else "has an encoder" if facts.encoder is not None else None
    if why is not None:
        raise ConfigError(f"enable_prompt_embeds: this model {why} and takes no prompts of embeddings; leave it out")
    return facts.media or MediaFacts((), facts.width)


def media_rows(config: EngineConfig, facts: ModelFacts) -> int:
    """Embeddings of media that the ranks keep: those of the longest prompt and of some steps, as far as their bytes are bounded."""
    media = media_of(config, facts)
    if media is None:
        return 0
    wanted = max(8 * config.max_num_batched_tokens, facts.max_positions if config.max_model_len is None else config.max_model_len)
    return store_rows(media, DTYPE_BYTES[facts.dtype], wanted)


def cache_groups(config: EngineConfig, target: Target, description: Description) -> tuple[tuple[CacheGroup, ...], float]:
    """Groups whose pages lie as the device wants them, and the share of bytes that padding takes."""
    sizes = page_sizes(description, target.table)
    if not any(description.facts.caches):
        return (), 0.0
    if config.block_size is not None:
        if config.block_size not in sizes:
            raise ConfigError(f"block_size={config.block_size} has no attention kernel here; there are {', '.join(map(str, sizes))}")
        sizes = (config.block_size,)
    groups = resolve_groups(description.facts.caches, sizes).groups
    alignment = target.info.limits.alignment
    page_bytes = max(-(-_needed(target, group) // alignment) * alignment for group in groups)
    groups = tuple(replace(group, page_bytes=page_bytes) for group in groups)
    there = page_bytes * sum(group.pages_per_state or 1 for group in groups)
    return groups, 1 - sum(group.used_bytes for group in groups) / there


def _needed(target: Target, group: CacheGroup) -> int:
    """Bytes of the smallest page that holds the group's tokens; of recurrent layers, as many as the grouping chose."""
    if group.kind is CacheKind.STATE:
        return group.page_bytes
    return target.device.kv_layout(replace(group, page_bytes=0)).page_bytes


def longest_sequence(groups: tuple[CacheGroup, ...], num_pages: int, ahead: int) -> int:
    """Most tokens that one sequence can have alone in the pool."""

    def fits(tokens: int) -> bool:
        return peak_pages(groups, tokens, ahead) <= num_pages - 1

    low, high = 0, 2**31  # beyond, where windows alone are kept, length costs nothing
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _depth(config: EngineConfig) -> int:
    return 2 if config.async_scheduling else 1


def _work(config: EngineConfig, description: Description, groups: tuple[CacheGroup, ...], target: Target) -> dict[str, int]:
    facts = description.facts
    width = sum(group.table_width(config.max_model_len or facts.max_positions) for group in groups)
    step = 8 * HEADER_WORDS + config.max_num_batched_tokens * (16 + 8 * len(groups)) + config.max_num_seqs * (128 + 4 * width)
    work = {
        "activations": config.max_num_batched_tokens * facts.work_bytes_per_token,
        "logits and sampling": config.max_num_seqs * facts.vocab_size * SAMPLING_BYTES,
        "step buffers": 4 * step * target.sharing,
    }
    if (media := media_of(config, facts)) is not None:
        work["media"] = media_rows(config, facts) * media.row_width * DTYPE_BYTES[facts.dtype]
    return work


def _request(
    config: EngineConfig, target: Target, description: Description, groups: tuple[CacheGroup, ...], work: dict[str, int]
) -> MemoryRequest:
    page_bytes = groups[0].page_bytes if groups else target.info.limits.alignment
    weights, total_work = description.facts.weight_bytes, sum(work.values())
    request = MemoryRequest(
        weights, total_work, page_bytes, config.device_memory_utilization / target.sharing, config.kv_cache_memory_bytes
    )
    if not groups:
        return replace(request, kv_bytes=2 * page_bytes)
    if config.num_gpu_blocks_override is not None:
        return replace(request, kv_bytes=(config.num_gpu_blocks_override + 1) * page_bytes)
    if request.kv_bytes is not None or Feature.UNIFIED_MEMORY not in target.info.features:
        return request
    left = target.device.memory.plan(request).kv
    wanted = SHARED_KV_BYTES // target.sharing
    return replace(request, kv_bytes=min(left, wanted) // page_bytes * page_bytes)


def _check_step(num_pages: int) -> None:
    if num_pages < 2:
        raise CapacityError(
            f"the KV pool has {num_pages} pages and needs at least 2: raise device_memory_utilization or kv_cache_memory_bytes",
            asked=2,
            available=num_pages,
        )


def embeds_width(config: EngineConfig, description: Description) -> int:
    """Numbers of a row of a prompt of embeddings; 0 where none are taken. Raises `ConfigError` where they cannot be."""
    if not config.enable_prompt_embeds:
        return 0
    if isinstance(description.spec, BridgeSpec):
        raise ConfigError("enable_prompt_embeds: this model runs through transformers, which is given tokens; leave it out")
    return description.spec.embed.width or description.spec.width


def _check_positions(config: EngineConfig, description: Description) -> None:
    allowed = description.facts.max_positions
    if config.max_model_len is not None and config.max_model_len > allowed:
        raise ConfigError(f"max_model_len={config.max_model_len} is above the {allowed} positions that the model has; give at most that")


def _max_model_len(config: EngineConfig, description: Description, longest: int) -> int:
    if config.max_model_len is None:
        return min(description.facts.max_positions, longest)
    if config.max_model_len > longest:
        raise CapacityError(
            f"max_model_len={config.max_model_len} does not fit the KV pool, which holds one sequence of {longest} tokens:"
            f" give --max-model-len {longest} or less, or the KV cache more memory",
            asked=config.max_model_len,
            available=longest,
        )
    return config.max_model_len
