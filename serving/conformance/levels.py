"""The checks of each level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pagoda.hal.discovery import choose
from pagoda.hal.errors import ConfigError
from pagoda.ops import kernel_store
from pagoda.serving.conformance import level0_device, level1_kernels, level2_graphs, level3_collectives, level4_models, level5_engine
from pagoda.serving.conformance.check import Check, Target

CHECKS: tuple[Callable[[Target], Iterator[Check]], ...] = (
    level0_device.checks,
    level1_kernels.checks,
    level2_graphs.checks,
    level3_collectives.checks,
    level4_models.checks,
    level5_engine.checks,
)
"""Per level, what makes its checks."""


def open_target(name: str) -> Target:
    """The device under test, whose kernels are compiled where its engines look for them. Raises `DeviceError` when it is not here and
    `ConfigError` for one that computes nothing."""
    found = choose(name)
    device = found.backend.open()
    if device.torch_device.type == "meta":
        raise ConfigError(f"device {name!r} computes nothing, so there is nothing to hold it to; name one that does")
    kernel_store.use(device.info)
    return Target(found.backend, device)


def all_checks(target: Target, levels: Iterable[int]) -> list[Check]:
    """The checks of these levels, in order."""
    return [check for level in levels for check in CHECKS[level](target)]
