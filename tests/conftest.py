"""Shared by all tests: what is missing on a machine is reported at the end and fails in CI, never a green skip; runs end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pytest

NOT_RUN = "not run: "

with contextlib.suppress(ImportError):  # tests/device/tpu have another environment
    from hypothesis import HealthCheck, settings

    # how long an example takes proves nothing
    settings.register_profile("pagoda", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("pagoda")


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("exit_patience", "seconds that the process may take to exit when the tests have ended", default="60")


def pytest_unconfigure(config: pytest.Config) -> None:
    patience = float(config.getini("exit_patience"))
    threading.Thread(target=_end_anyway, args=(patience,), name="exit-guard", daemon=True).start()


def _end_anyway(patience: float) -> None:
    """The interpreter waits for threads that are no daemons, however long: they are named, and the run fails."""
    time.sleep(patience)
    frames = sys._current_frames()
    told = [f"pytest has ended, but its process still waits after {patience:g} s:\n"]
    for thread in threading.enumerate():
        if not thread.daemon and thread.ident in frames:
            told += [f"\nthread {thread.name!r}\n", *traceback.format_stack(frames[thread.ident])]
    os.write(2, "".join(told).encode(errors="replace"))
    os._exit(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    missing = sorted({str(report.longrepr[2]).split(NOT_RUN, 1)[1] for report in skipped if NOT_RUN in str(report.longrepr)})
    for what in missing:
        terminalreporter.write_line(f"{NOT_RUN}{what}", yellow=True)
