"""Level 1, the kernels: every registered one against its primitive's float64 oracle, over the primitive's generator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import Any

import torch
from pagoda.hal.info import Feature
from pagoda.hal.kernel import Kernel
from pagoda.ops.check import Report, check_kernel
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.table import candidates
from pagoda.serving.conformance.check import Check, FailedError, SkippedError, Split, Target, UnclaimedError, in_parts

TOGETHER = 4
"""Neighbours among a primitive's cases that stay together where their facts are equal: mostly they need the same programs."""
PARTS, MANY = 2, {"paged_attention": 16, "moe_mlp_fp8": 4, "moe_mlp": 4, "gemm_fp8": 4}
"""Of a dtype's cases, where a compiler makes the kernel's programs as they are met: for the primitives that ask for most of them more."""
COMPILING = 10.0
"""What such a part costs, where the cases of one dtype cost 1 without a compiler."""


def checks(target: Target) -> Iterator[Check]:
    """One check a kernel, over every dtype that the device and the kernel compute in."""
    for kernel in sorted(candidates(target.backend), key=lambda kernel: (kernel.op, kernel.name)):
        yield in_parts(1, f"{kernel.op}={kernel.name}", _split(target, kernel))


def _split(target: Target, kernel: Kernel) -> Split:
    if kernel.op not in ALL_OPS or kernel.needs.refuse_device(target.device.info) is not None:
        return Split((), partial(_refused, target, kernel))
    compiled = Feature.TRITON in kernel.needs.features
    count = MANY.get(kernel.op, PARTS) if compiled else 1
    parts = [
        partial(_part, kernel=kernel, dtype=dtype, part=part, parts=count) for dtype in _dtypes(target, kernel) for part in range(count)
    ]
    return Split(tuple(parts), _joined, COMPILING * count if compiled else float(MANY.get(kernel.op, 1)))


def _refused(target: Target, kernel: Kernel, _: list[Report]) -> str:
    if kernel.op not in ALL_OPS:
        raise FailedError(f"there is no primitive {kernel.op!r}; there are {', '.join(sorted(ALL_OPS))}")
    raise UnclaimedError(kernel.needs.refuse_device(target.device.info))


def _joined(found: list[Report]) -> str:
    reports = [reduce(Report.joined, of_dtype) for _, of_dtype in groupby(found, lambda report: report.dtype)]
    failed = [report for report in reports if report.failures]
    if failed:
        raise FailedError("\n".join(map(str, failed)))
    if not any(report.ran for report in reports):
        reasons = sorted({reason for report in reports for reason in report.refused})
        raise SkippedError(f"no generated case reaches this kernel, so nothing shows that it works: {'; '.join(reasons)}")
    return "; ".join(f"{report.dtype} {report.ran} cases, {report.worst:.2f} of the allowed error" for report in reports if report.ran)


def _dtypes(target: Target, kernel: Kernel) -> list[str]:
    wanted = [*ALL_OPS[kernel.op].dtypes, *(["float64"] if target.device.info.model == "reference" else [])]
    return [dtype for dtype in wanted if dtype in target.device.info.dtypes and (not kernel.needs.dtypes or dtype in kernel.needs.dtypes)]


def _part(target: Target, kernel: Kernel, dtype: str, part: int, parts: int) -> Report:
    device, op = target.device, ALL_OPS[kernel.op]
    cases = None if parts == 1 else _cases(kernel.op, dtype, part, parts)
    where: dict[str, Any] = {"device": device.torch_device, "info": device.info, "settle": device.synchronize}
    report = check_kernel(kernel, op, dtype=dtype, cases=cases, **where)
    device.synchronize()
    return report


def _cases(op: str, dtype: str, part: int, parts: int) -> list[Case]:
    return [case for number, group in enumerate(_groups(op, dtype)) if number % parts == part for case in group]


@lru_cache(maxsize=4)
def _groups(op: str, dtype: str) -> list[list[Case]]:
    """A primitive's cases, up to `TOGETHER` neighbours with equal facts a group."""
    cases = ALL_OPS[op].generate(torch.Generator().manual_seed(0), dtype)
    alike = [list(group) for _, group in groupby(cases, lambda case: repr(case.facts))]
    return [group[at : at + TOGETHER] for group in alike for at in range(0, len(group), TOGETHER)]
