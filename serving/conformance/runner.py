"""Runs levels on a device and makes the report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from pagoda.hal.device import Device
from pagoda.hal.discovery import choose
from pagoda.hal.errors import ConfigError
from pagoda.hal.info import Feature
from pagoda.ops.table import candidates
from pagoda.serving.conformance import level0_device, level1_kernels, level2_graphs, level3_collectives, level4_models, level5_engine
from pagoda.serving.conformance.check import Check, Target
from pagoda.serving.conformance.report import LEVELS, Report, Result
from pagoda.serving.conformance.results import results_of

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
    """The device under test. Raises `DeviceError` when it is not here and `ConfigError` for one that computes nothing."""
    found = choose(name)
    device = found.backend.open()
    if device.torch_device.type == "meta":
        raise ConfigError(f"device {name!r} computes nothing, so there is nothing to hold it to; name one that does")
    return Target(found.backend, device)


def all_checks(target: Target, levels: Iterable[int]) -> list[Check]:
    """The checks of these levels, in order."""
    return [check for level in levels for check in CHECKS[level](target)]


def run_levels(
    name: str,
    levels: tuple[int, ...] = tuple(range(len(LEVELS))),
    say: Callable[[Result], None] | None = None,
    only: Sequence[str] = (),
    jobs: int = 1,
) -> Report:
    """Run `levels` on device `name`, or the checks of them that `only` asks for: by the whole name, or by a part of several names.

    `say` is told each result as it comes. Kernels, most of whose time is their compiler's, are checked in `jobs` processes at once where
    that is more than one.
    """
    unknown = [level for level in levels if not 0 <= level < len(CHECKS)]
    if unknown:
        raise ConfigError(f"there is no conformance level {unknown[0]}; levels are 0 to {len(CHECKS) - 1}: {', '.join(LEVELS)}")
    target = open_target(name)
    found = all_checks(target, levels)
    missing = [part for part in only if not any(part in check.name for check in found)]
    if missing:
        raise ConfigError(f"no check of these levels has {missing[0]!r} in its name; run without --check to see their names")
    whole = {check.name for check in found}.intersection(only)
    chosen = [check for check in found if not only or check.name in whole or any(part in check.name for part in only if part not in whole)]
    if only:
        levels = tuple(sorted({check.level for check in chosen}))
    report = Report(target.backend.name, _facts(target.device), _kernels(target), levels)
    for result in results_of(chosen, target, jobs):
        report.results.append(result)
        if say is not None:
            say(result)
    return report


def _facts(device: Device) -> dict[str, str]:
    info = device.info
    packages = {name: _version(name) for name in ("pagoda-llm", "torch", "triton", "transformers")}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": f"{info.vendor} {info.model} ({info.arch})",
        "driver": info.driver or "none",
        "memory": f"{info.memory_bytes:,} bytes",
        "dtypes": ", ".join(sorted(info.dtypes)),
        "features": ", ".join(sorted(feature.value for feature in info.features)),
        "features not claimed": ", ".join(sorted(feature.value for feature in set(Feature) - info.features)),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {number}" for name, number in packages.items() if number),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kernels(target: Target) -> dict[str, list[str]]:
    offered: dict[str, list[str]] = {}
    for kernel in sorted(candidates(target.backend), key=lambda kernel: kernel.op):
        offered.setdefault(kernel.op, []).append(kernel.name)
    return offered
