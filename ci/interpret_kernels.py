"""Every Triton kernel in Triton's interpreter, on the CPU, against the float64 oracle: `python ci/interpret_kernels.py [--ops …]`.

Shows wrong arithmetic, masks and strides, not what a compiler makes of them. float32 and float16 only: the interpreter's bfloat16 is
silently wrong, and its casts to bfloat16 round otherwise than a device's; float8 pages are bytes there, as on devices whose Triton
lacks float8. Runs in a process of its own, since Triton decides when a kernel is declared whether it is interpreted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel, Reason
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.check import Report, check_kernel
from pagoda.ops.registry import ALL_OPS

DTYPES = ("float32", "float16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", help="only these primitives, with commas between")
    only = parser.parse_args().ops
    warnings.simplefilter("ignore")
    kernels = [_exact(kernel) for kernel in find("cuda").kernels() if kernel.implementation.startswith("pagoda.ops.triton.")]
    failed, never = [], []
    for kernel in kernels:
        if only and kernel.op not in only.split(","):
            continue
        reports = []
        for dtype in sorted(set(DTYPES) & set(ALL_OPS[kernel.op].dtypes) & kernel.needs.dtypes):
            began = time.perf_counter()
            reports.append(check_kernel(kernel, ALL_OPS[kernel.op], dtype=dtype))
            print(f"{reports[-1]} in {time.perf_counter() - began:.0f} s", flush=True)
        failed += [report for report in reports if report.failures]
        if not any(report.ran for report in reports):
            never.append(f"{kernel.op}={kernel.name}")
    return _verdict(failed, never)


def _exact(kernel: Kernel) -> Kernel:
    """Without the cases that are nothing but a cast which the interpreter does in its own way."""
    before = kernel.accepts
    if kernel.op != "write_kv" or before is None:
        return kernel

    def accepts(facts: AttentionFacts) -> Reason | None:
        cast = facts.kv_dtype != facts.dtype and facts.kv_dtype == "bfloat16"
        return f"the interpreter rounds to {facts.kv_dtype} in its own way" if cast else before(facts)

    return replace(kernel, accepts=accepts)


def _verdict(failed: list[Report], never: list[str]) -> int:
    if never:
        print(f"no case ran of {', '.join(never)}")
    print(f"failed: {', '.join(f'{report.op}={report.kernel} {report.dtype}' for report in failed)}" if failed else "none failed")
    return 1 if failed or never else 0


if __name__ == "__main__":
    sys.exit(main())
