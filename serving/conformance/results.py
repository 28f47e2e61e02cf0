"""From checks to results: one after the other here, or those that can be, in parts, by several processes at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from pagoda.serving.conformance.answers import Answer, joined, run_check
from pagoda.serving.conformance.check import Check, Target
from pagoda.serving.conformance.report import Outcome, Result
from pagoda.serving.conformance.workers import LATE, Job, shared


def results_of(checks: Sequence[Check], target: Target, jobs: int = 1, limit_s: float | None = None) -> Iterator[Result]:
    """As they come: `checks`, which are sorted by level, one after the other; where `jobs` is more than one, what can be split is shared by
    so many processes, after all that wants the device, or several, for itself. What does not end within `limit_s` seconds is not shown."""
    until = None if limit_s is None else time.monotonic() + limit_s
    apart = [check for check in checks if jobs > 1 and check.split is not None and check.split.parts]
    yield from _here([check for check in checks if check not in apart], target, until)
    yield from _apart(apart, target.backend.name, jobs, until)


def _here(checks: Sequence[Check], target: Target, until: float | None) -> Iterator[Result]:
    for check in checks:
        if until is not None and time.monotonic() >= until:
            yield Result(check.level, check.name, Outcome.SKIPPED, LATE.detail)
        else:
            yield run_check(check, target)


def _apart(checks: Sequence[Check], device: str, jobs: int, until: float | None) -> Iterator[Result]:
    by_name = {(check.level, check.name): check for check in checks}
    missing: dict[tuple[int, str], dict[int, Answer]] = {key: {} for key in by_name}
    for job, answer in shared(device, _dearest_first(checks), jobs, until):
        check, found = by_name[job.level, job.name], missing[job.level, job.name]
        found[job.part] = answer
        assert check.split is not None
        if len(found) == len(check.split.parts):
            yield joined(check, [found[part] for part in sorted(found)])


def _dearest_first(checks: Sequence[Check]) -> list[Job]:
    """Level by level: what level 1 compiles the others find. Of equal costs all parts of a check are neighbours."""
    costs = [(check.level, -check.split.cost, check) for check in checks if check.split is not None]
    ordered = [check for *_, check in sorted(costs, key=lambda cost: cost[:2])]
    return [Job(check.level, check.name, part) for check in ordered if check.split for part in range(len(check.split.parts))]
