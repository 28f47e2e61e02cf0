"""What `pagoda plan MODEL` prints before anything loads: where bytes go, what fits, which kernel each primitive gets and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import CacheGroup, stored_dim
from pagoda.hal.memory import MemoryPlan
from pagoda.hal.table import Choice, KernelTable
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.fusion import Fused, Site, chains_of, find, summary
from pagoda.models.load import Description
from pagoda.ops.rope_write import RopeWriteFacts
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.groups import peak_pages
from pagoda.serving.engine.sizing import Sizes, describe_model, in_whole_steps, size
from pagoda.serving.engine.spec.make import taps_of
from pagoda.serving.engine.target import open_target


@dataclass(frozen=True)
class EnginePlan:
    """One rank's plan; all ranks have the same.

    Attributes:
        config: what was asked. model: where its files are.
        architecture, parameters, dtype, kv_dtype, format: of the model.
        device: what it runs on; why: what its backend says of it. world: ranks.
        weights: bytes by part of the model, on one rank; their sum is `memory.weights`. work: bytes of the largest step by purpose.
        memory: where the device's bytes go.
        groups: cache groups; padding: share of page bytes that hold nothing.
        num_pages: usable pages. tokens: tokens of KV that they hold when every sequence is as long as the model allows.
        max_model_len: longest sequence; longest: what the pool alone would allow; max_positions: what the model would.
        requests: (length, how many sequences of that length run at the same time), up to `max_model_len`.
        kernels: every use of a primitive with the kernel that it gets and why others were passed over.
        fusions: what each rule of fusion came to, with the layers that a drafter taps.
    """

    config: EngineConfig
    model: str
    architecture: str
    parameters: int
    dtype: str
    kv_dtype: str
    format: str
    device: DeviceInfo
    why: str
    world: int
    weights: Mapping[str, int]
    work: Mapping[str, int]
    memory: MemoryPlan
    groups: tuple[CacheGroup, ...]
    padding: float
    num_pages: int
    tokens: int
    max_model_len: int
    longest: int
    max_positions: int
    requests: tuple[tuple[int, int], ...]
    kernels: tuple[Choice, ...]
    fusions: tuple[Fused, ...]


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Plan without loading a weight, also for a device that is not here (`device="cuda:h200"`, `"null:h200"`).

    Raises what starting the engine would raise for the same reasons.
    """
    target = open_target(config, plan_only=True)
    description = describe_model(config, target)
    config = in_whole_steps(config, description)
    sizes = size(config, target, description)
    for op, facts in dict.fromkeys(description.uses):
        target.table.choose(op, facts)
    taps, usable = taps_of(config.speculation, len(description.facts.caches)), sizes.num_pages - 1
    longest = sizes.max_model_len
    return EnginePlan(
        config=config,
        model=config.model,
        architecture=description.facts.architecture + (" (transformers' module)" if description.family is None else ""),
        parameters=description.facts.parameters,
        dtype=description.numerics.dtype,
        kv_dtype=description.numerics.kv_dtype,
        format=type(description.format).__name__,
        device=target.info,
        why=target.why,
        world=config.tensor_parallel_size,
        weights=weights_by_part(description),
        work=sizes.work,
        memory=sizes.memory,
        groups=sizes.groups,
        padding=sizes.padding,
        num_pages=usable,
        tokens=usable * longest // _pages_at(sizes.groups, longest, config.max_num_batched_tokens),
        max_model_len=sizes.max_model_len,
        longest=sizes.longest,
        max_positions=description.facts.max_positions,
        requests=tuple((length, _fit_at(sizes, length, config)) for length in _lengths(longest)),
        fusions=_fusions(target.table, description, sizes.groups, taps),
        kernels=_kernels(target.table, sizes.groups),
    )


def weights_by_part(description: Description) -> dict[str, int]:
    """Bytes of one rank's weights by part of the model, from the share that each part has of the checkpoint's numbers."""
    if isinstance(description.spec, BridgeSpec):
        return {"transformers module": description.facts.weight_bytes}
    parts: dict[str, float] = {}
    for path, parameter in description.parameters.items():
        split = 1 if parameter.role == "replicated" else description.shard.world
        parts[_part(path)] = parts.get(_part(path), 0.0) + _stored_bytes(description, path, parameter.shape) / split
    total, bytes_ = sum(parts.values()), description.facts.weight_bytes
    rounded = {part: int(bytes_ * share / total) for part, share in parts.items()}
    largest = max(rounded, key=lambda part: rounded[part])
    rounded[largest] += bytes_ - sum(rounded.values())
    return rounded


def _kernels(table: KernelTable, groups: tuple[CacheGroup, ...]) -> tuple[Choice, ...]:
    """Every choice but those that were only asked to learn which page sizes there are."""
    used = {group.tokens_per_page for group in groups}
    return tuple(choice for choice in table.explain() if getattr(choice.facts, "page_size", None) in {None, *used})


def _fusions(table: KernelTable, description: Description, groups: tuple[CacheGroup, ...], taps: tuple[int, ...]) -> tuple[Fused, ...]:
    """Of the model with the pages that it will have; what they choose joins the table's choices."""
    spec, adapters = description.spec, description.lora is not None
    if isinstance(spec, BridgeSpec):
        return ()
    found = find(chains_of(spec, description.numerics, description.shard, adapters=adapters, taps=taps, stored=description.format))
    sites = [site.on(table, _page_size(site, groups)) for site in found]
    for site in sites:
        if site.facts is not None:
            table.choose(site.rule.op, site.facts)
    return summary(sites)


def _page_size(site: Site, groups: tuple[CacheGroup, ...]) -> int | None:
    """Tokens per page of the layers that have such heads, where it is about pages."""
    if not isinstance(site.facts, RopeWriteFacts):
        return None
    heads = (site.facts.num_kv_heads, stored_dim(site.facts.head_dim, site.facts.kv_dtype))
    return next(group.tokens_per_page for group in groups for cache in group.caches if (cache.heads, cache.k_dim) == heads)


def _part(path: str) -> str:
    words = path.split(".")
    if words[0] != "layers":
        return {"embed": "embedding", "head": "head"}.get(words[0], "norms")
    return {"mixer": "attention", "ff": "feed-forward"}.get(words[2], "norms")


def _stored_bytes(description: Description, path: str, shape: tuple[int, ...]) -> float:
    stored = description.stored.get(path)
    nbytes = getattr(stored, "nbytes", None)
    return float(nbytes) if nbytes is not None else float(prod(shape))


def _pages_at(groups: tuple[CacheGroup, ...], length: int, ahead: int) -> int:
    return max(1, peak_pages(groups, length, ahead))


def _fit_at(sizes: Sizes, length: int, config: EngineConfig) -> int:
    return min(config.max_num_seqs, (sizes.num_pages - 1) // _pages_at(sizes.groups, length, config.max_num_batched_tokens))


def _lengths(longest: int) -> tuple[int, ...]:
    """Powers of four from 256 on, and the longest."""
    lengths = [256]
    while lengths[-1] * 4 < longest:
        lengths.append(lengths[-1] * 4)
    return (*(length for length in lengths if length < longest), longest)
