"""Shared by all tests: what is missing on a machine is reported at the end and fails in CI; it is never a green skip."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

NOT_RUN = "not run: "


@pytest.fixture
def require() -> Callable[[str, bool], None]:
    """`require("browser", found)`: go on if found; else report 'not run: browser', and fail where CI=true."""

    def check(what: str, found: bool) -> None:
        if found:
            return
        if os.environ.get("CI") == "true":
            pytest.fail(f"{NOT_RUN}{what}; CI must have it")
        pytest.skip(f"{NOT_RUN}{what}")

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    missing = sorted({str(report.longrepr[2]).split(NOT_RUN, 1)[1] for report in skipped if NOT_RUN in str(report.longrepr)})
    for what in missing:
        terminalreporter.write_line(f"{NOT_RUN}{what}", yellow=True)
