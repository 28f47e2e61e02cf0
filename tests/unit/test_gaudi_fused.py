"""The fused operators of Intel's bridge as we call them, by their published calls and formulas, against each primitive's float64 oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from habana_on_host import FusedRMSNorm, library, modules
from pagoda.backends.gaudi import fused
from pagoda.hal.discovery import find
from pagoda.ops.check import check_kernel
from pagoda.ops.registry import ALL_OPS

KERNELS = {kernel.op: kernel for kernel in find("gaudi").kernels()}
INFO = find("gaudi").describe("gaudi3")


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    operators = library()
    yield
    operators._destroy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", sorted(KERNELS))
def test_an_operator_is_what_its_oracle_says(op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SPARE", 1 << 30)  # every step's shape by the operator
    report = check_kernel(KERNELS[op], ALL_OPS[op], dtype=dtype, info=INFO)
    assert not report.failures, str(report)
    assert report.ran > 3 or dtype not in KERNELS[op].needs.dtypes, str(report)


def test_a_step_of_mostly_padding_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SPARE", 0)
    monkeypatch.delitem(sys.modules, "habana_frameworks.torch.hpex.kernels")
    op = ALL_OPS["paged_attention"]
    cases = islice(op.generate(torch.Generator().manual_seed(0), "bfloat16"), 12)
    report = check_kernel(KERNELS["paged_attention"], op, dtype="bfloat16", info=INFO, cases=cases)
    assert report.ran > 3 and not report.failures, str(report)


def test_a_wrong_argument_is_no_call() -> None:
    with pytest.raises(TypeError):
        FusedRMSNorm.apply(torch.ones(1, 1, 4), torch.ones(4))


def test_without_the_bridge_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in modules():
        monkeypatch.delitem(sys.modules, name)
    assert KERNELS["rms_norm"].needs.refuse_device(INFO) == "package habana_frameworks is not installed"
