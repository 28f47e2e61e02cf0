"""From checks to results: one after the other here, or those of kernels in processes of their own."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache

from pagoda.hal.discovery import find
from pagoda.hal.errors import PagodaError
from pagoda.serving.conformance import level1_kernels
from pagoda.serving.conformance.check import Check, FailedError, SkippedError, Target, UnclaimedError
from pagoda.serving.conformance.report import Outcome, Result

KERNELS = 1
"""The level whose checks need neither each other nor the device for themselves."""


def results_of(checks: Sequence[Check], target: Target, jobs: int = 1) -> Iterator[Result]:
    """In the order of `checks`, which are sorted by level; those of kernels in `jobs` processes at once where that is more than one."""
    apart = [check for check in checks if check.level == KERNELS and jobs > 1]
    yield from (run_check(check, target) for check in checks if check.level < KERNELS)
    yield from _apart([check.name for check in apart], target.backend.name, jobs) if apart else ()
    yield from (run_check(check, target) for check in checks if check.level >= KERNELS and check not in apart)


def run_check(check: Check, target: Target) -> Result:
    """One check; never raises for what the device does wrong."""
    start = time.perf_counter()
    outcome, detail = _answer(check, target)
    return Result(check.level, check.name, outcome, detail, time.perf_counter() - start)


def _answer(check: Check, target: Target) -> tuple[Outcome, str]:
    try:
        return Outcome.PASSED, check.run(target) or ""
    except UnclaimedError as reason:
        return Outcome.UNCLAIMED, str(reason)
    except SkippedError as reason:
        return Outcome.SKIPPED, str(reason)
    except (FailedError, PagodaError) as error:
        return Outcome.FAILED, str(error) if isinstance(error, FailedError) else f"{type(error).__name__}: {error}"
    except Exception:
        return Outcome.FAILED, traceback.format_exc(limit=-4)


def _apart(names: Sequence[str], device: str, jobs: int) -> Iterator[Result]:
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_kernel, device, name) for name in names]
        for name, future in zip(names, futures, strict=True):
            yield _arrived(name, future)


def _arrived(name: str, future: Future[Result]) -> Result:
    try:
        return future.result()
    except BrokenProcessPool:
        return Result(
            KERNELS, name, Outcome.FAILED, "a process that checks kernels was ended by this check or by one beside it; see --jobs 1", 0
        )


def _kernel(device: str, name: str) -> Result:
    target, checks = _opened(device)
    return run_check(checks[name], target)


@lru_cache(maxsize=1)
def _opened(device: str) -> tuple[Target, dict[str, Check]]:
    backend = find(device)
    target = Target(backend, backend.open())
    return target, {check.name: check for check in level1_kernels.checks(target)}
