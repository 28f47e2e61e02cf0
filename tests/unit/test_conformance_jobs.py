"""Kernels checked in several processes give what one process gives, in the same order; one that is ended is said to have failed."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

from pagoda.serving.conformance.report import Outcome, Result
from pagoda.serving.conformance.results import _arrived
from pagoda.serving.conformance.runner import run_levels

SOME = ("rms_norm", "top_logprobs")


def test_two_processes_find_what_one_finds() -> None:
    one, two = (run_levels("reference", (0, 1), only=("facts agree", *SOME), jobs=jobs) for jobs in (1, 2))
    found = [[(result.level, result.name, result.outcome, result.detail) for result in report.results] for report in (one, two)]
    assert len(found[0]) >= 3 and found[0] == found[1] and two.passed()


def test_a_process_that_ends_fails_its_check() -> None:
    future: Future[Result] = Future()
    future.set_exception(BrokenProcessPool("gone"))
    result = _arrived("gemm=mine", future)
    assert result.outcome is Outcome.FAILED and result.name == "gemm=mine" and "--jobs 1" in result.detail
