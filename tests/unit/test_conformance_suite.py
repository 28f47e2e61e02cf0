"""The conformance suite itself: what passes a level, the report's three forms, and that wrong devices are caught."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.backends.torch_host.memory import HostMemory
from pagoda.hal.discovery import find
from pagoda.hal.errors import ConfigError
from pagoda.hal.graphs import Replay
from pagoda.hal.kernel import Kernel, Needs
from pagoda.hal.memory import MemoryKind, MemoryPlan, MemoryRequest
from pagoda.serving.conformance import level0_device, level1_kernels, level2_graphs
from pagoda.serving.conformance.answers import run_check
from pagoda.serving.conformance.check import Check, SkippedError, Target, UnclaimedError
from pagoda.serving.conformance.levels import open_target
from pagoda.serving.conformance.report import Outcome, Report, Result
from pagoda.serving.conformance.runner import run_levels


def report(*outcomes: Outcome, levels: tuple[int, ...] = (0,)) -> Report:
    results = [Result(0, f"check {number}", outcome, "why <&>\nmore", 0.5) for number, outcome in enumerate(outcomes)]
    return Report("chip", {"device": "a chip"}, {"gemm": ["reference"]}, levels, results)


@pytest.mark.parametrize(
    ("outcomes", "passes"),
    [
        ((Outcome.PASSED,), True),
        ((Outcome.PASSED, Outcome.UNCLAIMED), True),
        ((Outcome.PASSED, Outcome.SKIPPED), False),
        ((Outcome.PASSED, Outcome.FAILED), False),
        ((Outcome.UNCLAIMED,), False),
        ((), False),
    ],
)
def test_a_level_passes_when_nothing_failed_and_nothing_claimed_was_skipped(outcomes: tuple[Outcome, ...], passes: bool) -> None:
    assert report(*outcomes).passed() is passes
    assert report(Outcome.PASSED, levels=(0, 1)).passed() is False, "level 1 showed nothing"


def test_three_forms() -> None:
    mixed = report(Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.UNCLAIMED)
    record = json.loads(mixed.to_json())
    assert record["levels"] == {"device": False} and record["results"][1]["outcome"] == "failed"
    suite = ElementTree.fromstring(mixed.to_junit())[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    assert [child.tag for case in suite for child in case] == ["system-out", "failure", "failure", "skipped"]
    text = mixed.to_markdown()
    assert "did not pass" in text and "| 0 device | **no** | 1 | 1 | 1 | 1 |" in text and "check 3: why <&> more" in text


def test_reports_of_parts_make_one() -> None:
    first, again = report(Outcome.FAILED, Outcome.PASSED), report(Outcome.PASSED)
    other = Report("chip", {"date": "today"}, {"rope": ["mine"]}, (3,), [Result(3, "a world of 1", Outcome.PASSED)])
    whole = Report.from_json(first.to_json()).joined(other).joined(again)
    assert Report.from_json(whole.to_json()) == whole
    assert [(one.level, one.name, one.outcome) for one in whole.results] == [
        (0, "check 0", Outcome.PASSED), (0, "check 1", Outcome.PASSED), (3, "a world of 1", Outcome.PASSED),
    ]  # fmt: skip
    assert whole.passed() and whole.levels == (0, 3) and set(whole.facts) == {"device", "date"} and set(whole.kernels) == {"gemm", "rope"}


def test_a_whole_name_is_one_check_and_a_part_of_names_several() -> None:
    def names(*only: str) -> list[str]:
        return [result.name for result in run_levels("cpu", (2,), only=only).results]

    assert names("replay equals eager on changed inputs [1]") == ["replay equals eager on changed inputs [1]"]
    assert len(names("replay equals eager on changed inputs")) > 1


def run(target: Target, name: str, checks: Callable[[Target], Any]) -> Result:
    found = [check for check in checks(target) if check.name.startswith(name)]
    assert found, f"no check {name!r}"
    return run_check(found[0], target)


@pytest.fixture
def target() -> Target:
    backend = find("cpu")
    return Target(backend, backend.open())


class Miscounting(HostMemory):
    def alloc(self, kind: MemoryKind, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


class Boastful(HostMemory):
    def plan(self, request: MemoryRequest) -> MemoryPlan:
        return MemoryPlan(self._total, 0, 0, 0, request.kv_bytes or self._total, 64, request.page_bytes)


@pytest.mark.parametrize(
    ("memory", "check"),
    [
        (Miscounting, "allocations are aligned"),
        (Miscounting, "over-allocate"),
        (Miscounting, "a plan equals"),
        (Boastful, "a plan equals"),
        (Boastful, "a plan that cannot fit"),
    ],
)
def test_wrong_memory_is_caught(target: Target, memory: type[HostMemory], check: str) -> None:
    assert run(target, check, level0_device.checks).outcome is Outcome.PASSED
    total = target.device.info.memory_bytes
    target.device.memory = memory(total, lambda: total, torch.device("cpu"))
    assert run(target, check, level0_device.checks).outcome is Outcome.FAILED


class Stale(EagerGraphs):
    """Replays what it once computed."""

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        outputs = fn(*inputs)

        def replay() -> Any:
            return outputs

        replay.nbytes = 0  # type: ignore[attr-defined]
        return replay  # type: ignore[return-value]


def test_a_stale_replay_is_caught(target: Target) -> None:
    name = "replay equals eager"
    assert run(target, name, level2_graphs.checks).outcome is Outcome.PASSED
    target.device.graphs = Stale()
    assert run(target, name, level2_graphs.checks).outcome is Outcome.FAILED


HALVED = """
import torch
from pagoda.hal.kernel import PlainKernel
class Halved(PlainKernel):
    def run(self, packed, x):
        return torch.nn.functional.linear(x, packed["weight"]) / 2
"""


class WithKernels:
    def __init__(self, *kernels: Kernel) -> None:
        self._kernels = kernels
        self.name = "cpu"

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels


@pytest.mark.parametrize(
    ("kernel", "outcome", "says"),
    [
        (Kernel("gemm", "mine", "conformance_halved:Halved"), Outcome.FAILED, ", allowed "),
        (Kernel("gemm", "mine", "no.such:Module"), Outcome.FAILED, "No module named"),
        (Kernel("gemm", "mine", "pagoda.ops.linear:GemmReference"), Outcome.PASSED, "cases"),
        (
            Kernel("gemm", "mine", "no.such:Module", accepts=lambda facts: "never"),
            Outcome.SKIPPED,
            "no generated case reaches",
        ),
        (Kernel("gemm", "mine", "no.such:Module", Needs(archs=frozenset({"elsewhere"}))), Outcome.UNCLAIMED, "needs elsewhere"),
        (Kernel("gemmm", "mine", "no.such:Module"), Outcome.FAILED, "no primitive 'gemmm'"),
    ],
)
def test_each_registered_kernel_is_judged(
    target: Target, kernel: Kernel, outcome: Outcome, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conformance_halved.py").write_text(HALVED)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(Target(WithKernels(kernel), target.device), f"{kernel.op}=mine", level1_kernels.checks)  # type: ignore[arg-type]
    assert result.outcome is outcome and says in result.detail, result


def test_outcomes_of_a_check(target: Target) -> None:
    def raising(error: Exception) -> Check:
        def work(_: Target) -> str | None:
            raise error

        return Check(0, "x", work)

    assert run_check(raising(UnclaimedError("no")), target).outcome is Outcome.UNCLAIMED
    assert run_check(raising(SkippedError("no")), target).outcome is Outcome.SKIPPED
    result = run_check(raising(KeyError("lost")), target)
    assert result.outcome is Outcome.FAILED and "KeyError: 'lost'" in result.detail


def test_a_device_that_computes_nothing_has_nothing_to_show() -> None:
    with pytest.raises(ConfigError, match="computes nothing"):
        open_target("null")
