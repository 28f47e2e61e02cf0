"""Every portable reference against the float64 oracle of its primitive, in every dtype it computes in."""

from __future__ import annotations

import pytest
from pagoda.ops.check import check_kernel
from pagoda.ops.references import reference_kernels
from pagoda.ops.registry import ALL_OPS

SLOW = {("paged_attention", "float64")}
"""Over five seconds."""
USES = [
    pytest.param(name, dtype, marks=pytest.mark.heavy if (name, dtype) in SLOW else ())
    for name in sorted(ALL_OPS)
    for dtype in ("float64", "float32", "bfloat16", "float16")
]


@pytest.mark.parametrize(("name", "dtype"), USES)
def test_reference_matches_oracle(name: str, dtype: str) -> None:
    op = ALL_OPS[name]
    report = check_kernel(op.reference_kernel(), op, dtype=dtype)
    assert report.ran > 5
    assert not report.failures, str(report)


def test_a_kernel_table_gets_the_reference_of_each_primitive() -> None:
    table = {kernel.op: kernel.implementation for kernel in reference_kernels()}
    assert table == {name: op.reference_kernel().implementation for name, op in ALL_OPS.items()}
