"""Checks shared by processes give what one process gives; one that ends, hangs or comes too late loses what it was asked, and no more."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pagoda.hal.discovery import find
from pagoda.ops.check import Failure
from pagoda.ops.check import Report as KernelReport
from pagoda.ops.registry import ALL_OPS
from pagoda.serving.conformance import level1_kernels
from pagoda.serving.conformance.answers import Answer, joined
from pagoda.serving.conformance.check import FailedError, Split, Target, UnclaimedError, in_parts
from pagoda.serving.conformance.levels import all_checks
from pagoda.serving.conformance.report import Outcome, Report
from pagoda.serving.conformance.results import _dearest_first
from pagoda.serving.conformance.runner import run_levels
from pagoda.serving.conformance.workers import Job, shared

SOME = ("rms_norm", "top_logprobs")
BRITTLE = """
import os, time
from dataclasses import replace
from pagoda.backends.cpu.backend import CpuBackend
from pagoda.hal.info import Feature
from pagoda.hal.kernel import Kernel, Needs
from pagoda.ops.activation import ActivationReference
from pagoda.ops.norm import LayerNormReference, RmsNormReference
COMPILED = Needs(features=frozenset({Feature.TRITON}))
class Brittle(CpuBackend):
    name = "brittle"
    def describe(self, model=None):
        info = super().describe()
        return replace(info, features=info.features | {Feature.TRITON})
    def open(self, index=0):
        device = super().open(index)
        device.info = self.describe()
        device.synchronize = Fragile.faults
        return device
    def kernels(self):
        return (
            Kernel("rms_norm", "ends", "brittle:Ends"),
            Kernel("activation", "hangs", "brittle:Hangs"),
            Kernel("rms_norm", "spoils", "brittle:Spoils"),
            Kernel("layer_norm", "fragile", "brittle:Fragile"),
            Kernel("gemm_fp8", "compiled", "pagoda.ops.linear_fp8:GemmFp8Reference", COMPILED),
        )
class Ends(RmsNormReference):
    def run(self, packed, x):
        os._exit(3)
class Spoils(RmsNormReference):
    def run(self, packed, x):
        Fragile.spoiled = True
        raise RuntimeError("an illegal memory access")
class Fragile(LayerNormReference):
    spoiled = False
    @classmethod
    def faults(cls):
        if cls.spoiled:
            raise RuntimeError("an illegal memory access")
    def run(self, packed, x):
        self.faults()
        return super().run(packed, x)
class Hangs(ActivationReference):
    def run(self, x):
        time.sleep(600)
"""


@pytest.fixture
def brittle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device with a kernel that ends its process, one that never returns, and one whose cases are shared."""
    (tmp_path / "brittle.py").write_text(BRITTLE)
    info = tmp_path / "brittle-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pagoda.backends]\nbrittle = brittle:Brittle\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "brittle"


def test_two_processes_find_what_one_finds() -> None:
    one, two = (run_levels("reference", (0, 1), only=("facts agree", *SOME), jobs=jobs) for jobs in (1, 2))
    found = [[(result.level, result.name, result.outcome, result.detail) for result in report.results] for report in (one, two)]
    assert len(found[0]) >= 3 and found[0] == found[1] and two.passed()


def test_a_process_that_ends_fails_its_own_check_alone(brittle: str) -> None:
    report = run_levels(brittle, (1,), only=("rms_norm=ends", "rms_norm=reference", "layer_norm=reference", "layer_norm=fragile"), jobs=2)
    found = {result.name: result for result in report.results}
    assert found["rms_norm=ends"].outcome is Outcome.FAILED and "exit code 3" in found["rms_norm=ends"].detail
    assert len(found) >= 4 and all(one.outcome is Outcome.PASSED for name, one in found.items() if name != "rms_norm=ends")


def test_what_fails_takes_its_process_along_and_nothing_else(brittle: str) -> None:
    """After a fault of a device all else fails in the process that it came in."""
    jobs = [Job(1, "rms_norm=spoils", 0), Job(1, "layer_norm=fragile", 0)]
    found = {job.name: answer.outcome for job, answer in shared(brittle, jobs, 1)}
    assert found == {"rms_norm=spoils": Outcome.FAILED, "layer_norm=fragile": Outcome.PASSED}


def test_what_does_not_end_in_time_is_not_shown(brittle: str) -> None:
    began, kept = time.monotonic(), list[Report]()
    report = run_levels(brittle, (0, 1), only=("activation=hangs", "facts agree"), jobs=2, limit_s=5, keep=kept.append)
    assert time.monotonic() - began < 500, "it would hang for ten minutes"
    found = {result.name: result for result in report.results}
    assert found["activation=hangs"].outcome is Outcome.SKIPPED and "time" in found["activation=hangs"].detail
    assert not report.passed(1) and len(kept) == len(found) == 2


def test_time_that_is_over_is_over_for_every_check() -> None:
    report = run_levels("reference", (2,), jobs=2, limit_s=1e-9)
    assert report.results and all(one.outcome is Outcome.SKIPPED and "time" in one.detail for one in report.results)


def test_a_report_that_is_cut_short_has_not_passed() -> None:
    seen: list[bool] = []
    run_levels("reference", (0,), only=("pages of 16", "facts agree"), keep=lambda report: seen.append(report.passed(0)))
    assert seen == [False, True]


@pytest.mark.parametrize("op", ["paged_attention", "gemm", "sample"])
@pytest.mark.parametrize("parts", [1, 2, 16])
def test_parts_have_every_case_once(op: str, parts: int) -> None:
    dtype = ALL_OPS[op].dtypes[0]
    whole = [case for group in level1_kernels._groups(op, dtype) for case in group]
    shared = [case for part in range(parts) for case in level1_kernels._cases(op, dtype, part, parts)]
    assert sorted(map(id, whole)) == sorted(map(id, shared))
    sizes = [len(level1_kernels._cases(op, dtype, part, parts)) for part in range(parts)]
    assert max(sizes) <= level1_kernels.TOGETHER * -(-len(level1_kernels._groups(op, dtype)) // parts)


def test_cases_of_a_compiled_kernel_are_shared_and_made_one_report(brittle: str) -> None:
    report = run_levels(brittle, (1,), only=("gemm_fp8=compiled", "gemm_fp8=reference"), jobs=2)
    own, reference = (one.detail for one in report.results)
    assert own == reference and "44 cases" in own and report.passed()


def _check(*outcomes: Outcome) -> list[Answer]:
    return [Answer(number, outcome, "" if outcome is Outcome.PASSED else f"why {number}", 1.0) for number, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "outcome", "detail"),
    [
        ((Outcome.PASSED, Outcome.PASSED), Outcome.PASSED, "0 1"),
        ((Outcome.PASSED, Outcome.SKIPPED), Outcome.SKIPPED, "why 1"),
        ((Outcome.SKIPPED, Outcome.FAILED, Outcome.FAILED), Outcome.FAILED, "why 1\nwhy 2"),
        ((Outcome.UNCLAIMED, Outcome.UNCLAIMED), Outcome.UNCLAIMED, "why 0\nwhy 1"),
    ],
)
def test_the_worst_part_decides(outcomes: tuple[Outcome, ...], outcome: Outcome, detail: str) -> None:
    check = in_parts(1, "a check", Split((), lambda found: " ".join(map(str, found))))
    result = joined(check, _check(*outcomes))
    assert (result.outcome, result.detail, result.name) == (outcome, detail, "a check") and result.seconds >= len(outcomes)


def test_parts_join_as_the_whole_does() -> None:
    def join(found: list[int]) -> str:
        if sum(found) > 3:
            raise FailedError(f"{sum(found)} is too much")
        raise UnclaimedError("too little to say")

    for parts, outcome in (((1, 3), Outcome.FAILED), ((1, 1), Outcome.UNCLAIMED)):
        check = in_parts(1, "a check", Split(tuple(lambda _, part=part: part for part in parts), join))
        assert joined(check, [Answer(part, Outcome.PASSED) for part in parts]).outcome is outcome
        with pytest.raises((FailedError, UnclaimedError)):
            check.run(None)  # type: ignore[arg-type]


def test_the_dearest_are_begun_first_level_by_level() -> None:
    def check(level: int, name: str, cost: float, parts: int):
        return in_parts(level, name, Split((lambda _: 0,) * parts, lambda found: None, cost))

    jobs = _dearest_first([check(1, "small", 1, 1), check(1, "large", 9, 3), check(2, "larger", 99, 1)])
    assert [(job.name, job.part) for job in jobs] == [("large", 0), ("large", 1), ("large", 2), ("small", 0), ("larger", 0)]


def test_reports_of_parts_add_up() -> None:
    one = KernelReport("gemm", "mine", "float32", 2, {"no": 1}, [], 0.25)
    other = KernelReport("gemm", "mine", "float32", 3, {"no": 2, "never": 1}, [Failure("a case", "wrong")], 0.5)
    assert one.joined(other) == KernelReport("gemm", "mine", "float32", 5, {"no": 3, "never": 1}, [Failure("a case", "wrong")], 0.5)


def test_every_name_is_there_once() -> None:
    backend = find("cpu")
    names = [(check.level, check.name) for check in all_checks(Target(backend, backend.open()), range(6))]
    assert len(names) == len(set(names))
