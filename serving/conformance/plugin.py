"""pytest plugin for vendors' CI: `pytest --pagoda-device NAME [--pagoda-level N …]` runs each conformance check as a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagoda.serving.conformance.check import Check, Target


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagoda")
    group.addoption("--pagoda-device", default=None, metavar="NAME", help="hold this Pagoda device to the contract")
    group.addoption("--pagoda-level", action="append", type=int, metavar="N", help="conformance level, repeatable; all when not given")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    name = config.getoption("--pagoda-device")
    if name is None:
        return
    from pagoda.serving.conformance.levels import all_checks, open_target  # nothing of it is needed by other test runs
    from pagoda.serving.conformance.report import LEVELS

    target = open_target(name)
    levels = sorted(set(config.getoption("--pagoda-level") or range(len(LEVELS))))
    for check in all_checks(target, levels):
        items.append(ConformanceItem.from_parent(session, name=f"{LEVELS[check.level]}: {check.name}", check=check, target=target))


class ConformanceItem(pytest.Item):
    """One check. Claimed and not shown is a failure; not claimed is a skip with the reason."""

    def __init__(self, *, check: Check, target: Target, **rest: object) -> None:
        super().__init__(**rest)  # type: ignore[arg-type]
        self._check, self._target = check, target

    def runtest(self) -> None:
        from pagoda.serving.conformance.answers import run_check
        from pagoda.serving.conformance.report import Outcome

        result = run_check(self._check, self._target)
        if result.outcome is Outcome.UNCLAIMED:
            pytest.skip(f"not claimed: {result.detail}")
        if result.outcome is not Outcome.PASSED:
            pytest.fail(f"{result.outcome.value}: {result.detail}", pytrace=False)

    def reportinfo(self) -> tuple[str, int, str]:
        return f"pagoda conformance level {self._check.level}", 0, self.name
