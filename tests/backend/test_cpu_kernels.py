"""Every CPU kernel, on every instruction set that this processor has, against the float64 oracle."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch  # before the library: they share one OpenMP runtime
from pagoda.backends.cpu.kernels import cpu_kernels
from pagoda.hal.kernel import Kernel
from pagoda.ops.check import check_kernel
from pagoda.ops.native.library import ISAS, available, here, load
from pagoda.ops.registry import ALL_OPS

KERNELS = {f"{kernel.op}={kernel.name}": kernel for kernel in cpu_kernels()}
NATIVE = sorted(name for name, kernel in KERNELS.items() if kernel.name.startswith("native"))


class ForIsa(Kernel):
    """A native kernel bound to one instruction set instead of the best."""

    def load(self, facts: Any) -> Any:
        module, _, attribute = self.implementation.partition(":")
        return getattr(import_module(module), attribute)(facts, load(self.name))


def test_the_library_is_built() -> None:
    assert torch.get_num_threads() >= 1
    assert available() is None, "run python -m pagoda.ops.native.build"
    assert here()[-1] == "baseline"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernel_matches_oracle(name: str, dtype: str) -> None:
    kernel = KERNELS[name]
    report = check_kernel(kernel, ALL_OPS[kernel.op], dtype=dtype)
    assert report.ran > 5, report.refused
    assert not report.failures, str(report)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in here()])
@pytest.mark.parametrize("name", NATIVE)
def test_every_instruction_set_matches_oracle(name: str, isa: str, dtype: str) -> None:
    kernel = KERNELS[name]
    bound = ForIsa(**{**vars(kernel), "name": isa})
    report = check_kernel(bound, ALL_OPS[kernel.op], dtype=dtype, seed=1)
    assert report.ran > 5, report.refused
    assert not report.failures, str(report)
