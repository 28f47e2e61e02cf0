"""CANN's operators as we call them, by their recorded signatures and documented formulas, against each primitive's float64 oracle."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from cann_on_host import stand_in
from pagoda.hal.discovery import find
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.check import check_kernel
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.registry import ALL_OPS

KERNELS = {kernel.op: kernel for kernel in find("ascend").kernels()}
INFO = find("ascend").describe("ascend910b")


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in())
    yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", sorted(KERNELS))
def test_an_operator_is_what_its_oracle_says(op: str, dtype: str) -> None:
    report = check_kernel(KERNELS[op], ALL_OPS[op], dtype=dtype, info=INFO)
    assert not report.failures, str(report)
    assert report.ran > 3 or dtype not in KERNELS[op].needs.dtypes, str(report)


def test_a_wrong_argument_is_no_call() -> None:
    with pytest.raises(TypeError, match="eps"):
        stand_in().npu_rms_norm(torch.ones(1, 4), torch.ones(4), eps=1e-6)


def test_what_the_operators_do_not_say_is_declined() -> None:
    base = AttentionFacts("bfloat16", "bfloat16", 8, 2, 64, 64, 16, 0.125)
    attention, experts = KERNELS["paged_attention"].accepts, KERNELS["moe_mlp"].accepts
    assert attention is not None and experts is not None
    assert attention(base) is None
    for facts, reason in {
        AttentionFacts("bfloat16", "bfloat16", 8, 2, 64, 64, 16, 0.125, window=9): "no window",
        AttentionFacts("bfloat16", "float8_e4m3fn", 8, 2, 64, 64, 16, 0.125): "in the dtype of q",
        AttentionFacts("bfloat16", "bfloat16", 8, 2, 72, 72, 16, 0.125): "a multiple of 16",
        AttentionFacts("bfloat16", "bfloat16", 128, 1, 64, 64, 16, 0.125): "not 128",
    }.items():
        assert reason in str(attention(facts))
    assert "no biases" in str(experts(MoeMlpFacts("bfloat16", 4, 32, 16, 2, bias=True)))


def test_without_the_package_references_run() -> None:
    del sys.modules["torch_npu"]
    assert KERNELS["rms_norm"].needs.refuse_device(INFO) == "package torch_npu is not installed"
