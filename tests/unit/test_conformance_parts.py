"""A report in parts is of the tree's own checks: what went is left out, what came is not shown until it has run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from pagoda.serving.conformance.report import Outcome, Report, Result

ROOT = Path(__file__).resolve().parents[2]
EARLIER = Report(
    "tpu",
    {"date": "2026-11-01"},
    {"rope": ["reference"], "gone": ["reference"]},
    (0, 1, 5),
    [
        Result(0, "a device", Outcome.PASSED),
        Result(1, "rope=reference", Outcome.PASSED, "float32 12 cases", 3.5),
        Result(1, "gone=reference", Outcome.FAILED, "no longer there"),
        Result(5, "rope=reference", Outcome.PASSED),
    ],
)
NAMED = [(0, "a device"), (1, "new=reference"), (1, "rope=reference")]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import conformance_parts

    return conformance_parts


def test_checks_of_another_tree_are_left_out(parts: ModuleType) -> None:
    report = parts.begun("tpu", NAMED, EARLIER)
    assert [(one.level, one.name, one.outcome) for one in report.results] == [
        (0, "a device", Outcome.PASSED),
        (1, "new=reference", Outcome.SKIPPED),
        (1, "rope=reference", Outcome.PASSED),
    ]
    assert report.results[2] == EARLIER.results[1]
    assert report.levels == (0, 1) and report.passed(0) and not report.passed(1)
    kernels = {"new": ["reference"], "rope": ["reference"]}
    ran = Report("tpu", {"date": "2026-11-30"}, kernels, (1,), [Result(1, "new=reference", Outcome.PASSED)])
    joined = report.joined(ran)
    assert joined.passed() and joined.kernels == ran.kernels and joined.facts == ran.facts


def test_without_an_earlier_report_nothing_is_shown(parts: ModuleType) -> None:
    report = parts.begun("tpu", NAMED, None)
    assert [(one.level, one.name) for one in report.results] == NAMED
    assert not any(report.passed(level) for level in (0, 1))
