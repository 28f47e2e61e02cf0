"""Level 1, the kernels: every registered one against its primitive's float64 oracle, over the primitive's generator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pagoda.hal.kernel import Kernel
from pagoda.ops.check import Report, check_kernel
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.table import candidates
from pagoda.serving.conformance.check import Check, FailedError, SkippedError, Target, UnclaimedError


def checks(target: Target) -> Iterator[Check]:
    """One check a kernel, over every dtype that the device and the kernel compute in."""
    for kernel in sorted(candidates(target.backend), key=lambda kernel: (kernel.op, kernel.name)):
        yield Check(1, f"{kernel.op}={kernel.name}", partial(_kernel, kernel=kernel))


def _kernel(target: Target, kernel: Kernel) -> str:
    if kernel.op not in ALL_OPS:
        raise FailedError(f"there is no primitive {kernel.op!r}; there are {', '.join(sorted(ALL_OPS))}")
    reason = kernel.needs.refuse_device(target.device.info)
    if reason is not None:
        raise UnclaimedError(reason)
    reports = [_check(target, kernel, dtype) for dtype in _dtypes(target, kernel)]
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


def _check(target: Target, kernel: Kernel, dtype: str) -> Report:
    device = target.device
    report = check_kernel(kernel, ALL_OPS[kernel.op], dtype=dtype, device=device.torch_device, info=device.info)
    device.synchronize()
    return report
