"""The device that an engine is told to run on, or to plan for: `--device NAME`, `NAME:INDEX`, or `NAME:MODEL` of an absent one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from pagoda.hal.device import Backend, Device, StandsIn
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
        sharing: ranks of the engine that live on this same device.
    """

    backend: Backend
    device: Device
    info: DeviceInfo
    table: KernelTable
    why: str
    sharing: int = 1


def open_target(config: EngineConfig, rank: int = 0, *, plan_only: bool = False) -> Target:
    """Open the device of one rank: ranks take devices of their own where there are enough, otherwise they share the first.

    An absent device is stood in for by the null device of the same model when only a plan is wanted. Raises `DeviceError`,
    `KernelError`.
    """
    policy = KernelPolicy(config.kernel, config.strict_kernels, config.batch_invariant)
    name, _, which = config.device.partition(":")
    if plan_only and which and not which.isdigit():
        return _described(name, which, policy)
    found = choose(name)
    first = int(which) if which.isdigit() else found.backend.describe(which).index if which else 0
    own = len(found.backend.devices()) >= first + config.tensor_parallel_size
    device = found.backend.open(first + rank if own else first)
    kernel_store.use(device.info)
    wrap = None if config.kernel_log == "off" else wrapper(config.kernel_log, logging.getLogger("pagoda.kernels").info)
    if config.graphs == "piecewise":
        wrap = apart(device.graphs, wrap)
    table = kernel_table(found.backend, device.info, policy, wrap)
    return Target(found.backend, device, device.info, table, found.probe.message, 1 if own else config.tensor_parallel_size)


def _described(name: str, model: str, policy: KernelPolicy) -> Target:
    backend, null = find(name), find("null")
    info = backend.describe(model)
    assert isinstance(null, StandsIn)
    device = null.stand_in(info)
    # What is installed here says nothing of the machine that is planned for.
    kernels = [replace(kernel, needs=replace(kernel.needs, packages=())) for kernel in candidates(backend)]
    return Target(backend, device, info, KernelTable(info, kernels, policy), f"described, not here: {info.vendor} {info.model}")
