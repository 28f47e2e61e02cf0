"""The device that an engine is told to run on, or to plan for: `--device NAME`, `NAME:INDEX`, or `NAME:MODEL` of an absent one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from pagoda.hal.device import Backend, Device, Spreads, StandsIn
from pagoda.hal.discovery import choose, find
from pagoda.hal.info import DeviceInfo
from pagoda.hal.table import KernelPolicy, KernelTable
from pagoda.ops import kernel_store
from pagoda.ops.call_log import wrapper
from pagoda.ops.table import candidates, kernel_table
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.graph_mode import apart


class Target(NamedTuple):
    """An opened device with its kernels.

    Attributes:
        why: the probe's sentence, or that it is described only.
        sharing: ranks of the engine that live on this same device. ranks: of the engine, a process each.
    """

    backend: Backend
    device: Device
    info: DeviceInfo
    table: KernelTable
    why: str
    sharing: int = 1
    ranks: int = 1


def ranks(config: EngineConfig) -> int:
    """How many an engine has: none beside the first where one process drives all the chips. Raises `DeviceError`."""
    world = config.tensor_parallel_size
    return _ranks_on(choose(config.device.partition(":")[0]).backend, world) if world > 1 else world


def _ranks_on(backend: Backend, world: int) -> int:
    return 1 if isinstance(backend, Spreads) else world


def open_target(config: EngineConfig, rank: int = 0, *, plan_only: bool = False) -> Target:
    """Open the device of one rank: ranks take devices of their own where there are enough, otherwise they share the first.

    An absent device is stood in for by the null device of the same model when only a plan is wanted. Raises `DeviceError`,
    `KernelError`.
    """
    policy = KernelPolicy(config.kernel, config.strict_kernels, config.batch_invariant)
    name, _, which = config.device.partition(":")
    if plan_only and which and not which.isdigit():
        return _described(name, which, policy)._replace(ranks=config.tensor_parallel_size)
    found = choose(name)
    first = int(which) if which.isdigit() else found.backend.describe(which).index if which else 0
    world = config.tensor_parallel_size
    device, sharing = _opened(found.backend, first, rank, world)
    kernel_store.use(device.info)
    wrap = None if config.kernel_log == "off" else wrapper(config.kernel_log, logging.getLogger("pagoda.kernels").info)
    if config.graphs == "piecewise":
        wrap = apart(device.graphs, wrap)
    table = kernel_table(found.backend, device.info, policy, wrap)
    return Target(
        found.backend, device, device.info, table, found.probe.message, sharing, _ranks_on(found.backend, config.tensor_parallel_size)
    )


def _opened(backend: Backend, first: int, rank: int, world: int) -> tuple[Device, int]:
    """A rank's device, and how many ranks share it."""
    if world > 1 and isinstance(backend, Spreads):
        return backend.open_spread(first, world), 1
    own = len(backend.devices()) >= first + world
    return backend.open(first + rank if own else first), 1 if own else world


def _described(name: str, model: str, policy: KernelPolicy) -> Target:
    backend, null = find(name), find("null")
    info = backend.describe(model)
    assert isinstance(null, StandsIn)
    device = null.stand_in(info)
    # What is installed here says nothing of the machine that is planned for.
    kernels = [replace(kernel, needs=replace(kernel.needs, packages=())) for kernel in candidates(backend)]
    return Target(backend, device, info, KernelTable(info, kernels, policy), f"described, not here: {info.vendor} {info.model}")
