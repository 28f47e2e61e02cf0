"""Runs levels on a device and makes the report."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from pagoda.hal.device import Device
from pagoda.hal.errors import ConfigError
from pagoda.hal.info import Feature
from pagoda.ops.table import candidates
from pagoda.serving.conformance.check import Check, Target
from pagoda.serving.conformance.levels import CHECKS, all_checks, open_target
from pagoda.serving.conformance.report import LEVELS, Outcome, Report, Result
from pagoda.serving.conformance.results import results_of


def run_levels(
    name: str,
    levels: tuple[int, ...] = tuple(range(len(LEVELS))),
    say: Callable[[Result], None] | None = None,
    only: Sequence[str] = (),
    jobs: int = 1,
    limit_s: float | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:
    """Run `levels` on device `name`, or the checks of them that `only` asks for: by the whole name, or by a part of several names.

    `say` is told each result as it comes, `keep` the report so far, in which what has no result yet is claimed and not shown. Kernels and
    models, most of whose time is a compiler's and an oracle's, are shared by `jobs` processes where that is more than one. What has not
    ended after `limit_s` seconds is not shown.
    """
    unknown = [level for level in levels if not 0 <= level < len(CHECKS)]
    if unknown:
        raise ConfigError(f"there is no conformance level {unknown[0]}; levels are 0 to {len(CHECKS) - 1}: {', '.join(LEVELS)}")
    target = open_target(name)
    chosen = _chosen(all_checks(target, levels), only)
    if only:
        levels = tuple(sorted({check.level for check in chosen}))
    places = {(check.level, check.name): place for place, check in enumerate(chosen)}
    results = [Result(check.level, check.name, Outcome.SKIPPED, "not run yet") for check in chosen]
    report = Report(target.backend.name, _facts(target.device), _kernels(target), levels, results)
    for result in results_of(chosen, target, jobs, limit_s):
        results[places[result.level, result.name]] = result
        if say is not None:
            say(result)
        if keep is not None:
            keep(report)
    return report


def _chosen(found: list[Check], only: Sequence[str]) -> list[Check]:
    missing = [part for part in only if not any(part in check.name for check in found)]
    if missing:
        raise ConfigError(f"no check of these levels has {missing[0]!r} in its name; run without --check to see their names")
    whole = {check.name for check in found}.intersection(only)
    return [check for check in found if not only or check.name in whole or any(part in check.name for part in only if part not in whole)]


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
