"""Level 4 notices a kernel that is slightly wrong, and pages that do not survive the journey."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagoda.backends.torch_host.kv import HostKVLayout
from pagoda.hal.device import Device
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel
from pagoda.hal.kv import CacheGroup, KVLayout, NeutralPages
from pagoda.serving.conformance import level4_models
from pagoda.serving.conformance.answers import run_check
from pagoda.serving.conformance.check import Target
from pagoda.serving.conformance.report import Outcome, Result

KIND = "grouped queries"
WRONG = """
from pagoda.ops.norm import RmsNormReference
class Wrong(RmsNormReference):
    def run(self, packed, x):
        return super().run(packed, x) * 1.01
"""


class WithKernel:
    """The CPU backend with one kernel more, preferred to all others."""

    name = "cpu"

    def kernels(self) -> tuple[Kernel, ...]:
        return (*find("cpu").kernels(), Kernel("rms_norm", "wrong", "conformance_wrong:Wrong", rank=1e9))


def run(target: Target, ending: str) -> Result:
    check = next(check for check in level4_models.checks(target) if check.name.startswith(KIND) and check.name.endswith(ending))
    return run_check(check, target)


@pytest.mark.parametrize("ending", ["[float32]", "elsewhere"])
def test_a_kernel_off_by_a_hundredth_is_caught(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = find("cpu").open()
    right = run(Target(find("cpu"), device), ending)
    assert right.outcome is Outcome.PASSED, right.detail
    (tmp_path / "conformance_wrong.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = run(Target(WithKernel(), device), ending)  # type: ignore[arg-type]
    assert wrong.outcome is Outcome.FAILED and "standard deviations" in wrong.detail


class Swapped(HostKVLayout):
    """Exports the heads in the wrong order."""

    def export(self, pool: torch.Tensor, pages: torch.Tensor) -> NeutralPages:
        form = super().export(pool, pages)
        return form._replace(k=form.k.flip(3))


def test_pages_exported_in_the_wrong_order_are_caught() -> None:
    device: Device = find("cpu").open()

    def swapped(group: CacheGroup) -> KVLayout:
        return Swapped(group, device.memory)

    device.kv_layout = swapped  # type: ignore[method-assign]
    assert run(Target(find("cpu"), device), "elsewhere").outcome is Outcome.FAILED
