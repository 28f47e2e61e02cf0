"""What `pagoda plan MODEL` prints before anything loads: where bytes go, what fits, which kernel each primitive gets and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import CacheGroup
from pagoda.hal.memory import MemoryPlan
from pagoda.hal.table import Choice
from pagoda.models.load import Description
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.groups import GroupRule
from pagoda.serving.engine.sizing import Sizes, describe_model, size
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


def plan_engine(config: EngineConfig) -> EnginePlan:
    """Plan without loading a weight, also for a device that is not here (`device="cuda:h200"`, `"null:h200"`).

    Raises what starting the engine would raise for the same reasons.
    """
    target = open_target(config, plan_only=True)
    description = describe_model(config, target)
    sizes = size(config, target, description)
    for op, facts in dict.fromkeys(description.uses):
        target.table.choose(op, facts)
    usable = sizes.num_pages - 1
    at_most = min(fit_at(sizes.groups, usable, sizes.max_model_len, config.max_num_batched_tokens), config.max_num_seqs)
    return EnginePlan(
        config=config,
        model=config.model,
        architecture=description.facts.architecture,
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
        tokens=sum(1 for _ in ()) or usable * sizes.max_model_len // max(1, _pages_of(sizes.groups, sizes.max_model_len, config)),
        max_model_len=sizes.max_model_len,
        longest=sizes.longest,
        max_positions=description.facts.max_positions,
        requests=_requests(sizes, config, at_most),
        kernels=target.table.explain(),
    )
