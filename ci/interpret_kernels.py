"""Every Triton kernel in Triton's interpreter, on the CPU, against the float64 oracle: `python ci/interpret_kernels.py [--ops …]`.

Shows wrong arithmetic, masks and strides, not what a compiler makes of them. float32 and float16 only: the interpreter's bfloat16 is
silently wrong, and its casts to bfloat16 round otherwise than a device's; float8 pages are bytes there, as on devices whose Triton
lacks float8. What stands on FlashInfer or cuDNN has a double of it (`flashinfer_double.py`, `cudnn_double.py`). Runs in a process of its
own, since Triton decides when a kernel is declared whether it is interpreted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import cudnn_double
import flashinfer_double
import pagoda.backends.cuda.kernels as cuda_records
import torch
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel, Reason
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.check import Failure, Report, check_kernel, has_weights, place
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.state import StateBatch

DTYPES = ("float32", "float16")
OURS = ("pagoda.ops.triton.", "pagoda.backends.cuda.flashinfer_attention:", "pagoda.backends.cuda.cudnn_attention:")
PIECE = 7
"""Tokens of the pieces that prompts are cut into."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", help="only these primitives, with commas between")
    parser.add_argument("--kernels", help="only these names")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    flashinfer_double.install()
    cudnn_double.install()
    setattr(cuda_records, "_prebuilt", lambda name: True)  # noqa: B010 - a name of another module
    kernels = [_exact(kernel) for kernel in find("cuda").kernels() if kernel.implementation.startswith(OURS)]
    failed, never = [], []
    for kernel in kernels:
        if any(asked and name not in asked.split(",") for asked, name in ((options.ops, kernel.op), (options.kernels, kernel.name))):
            continue
        reports = []
        for dtype in sorted(set(DTYPES) & set(ALL_OPS[kernel.op].dtypes) & kernel.needs.dtypes):
            began = time.perf_counter()
            reports.append(check_kernel(kernel, ALL_OPS[kernel.op], dtype=dtype))
            if "batch_invariant" in kernel.claims:
                reports[-1].failures += _cut(kernel, dtype)
            print(f"{reports[-1]} in {time.perf_counter() - began:.0f} s", flush=True)
        failed += [report for report in reports if report.failures]
        if not any(report.ran for report in reports):
            never.append(f"{kernel.op}={kernel.name}")
    return _verdict(failed, never)


def _cut(kernel: Kernel, dtype: str) -> list[Failure]:
    """Recurrences: where a request's numbers depend on its company or on where its tokens are cut."""
    cases = (case for case in ALL_OPS[kernel.op].generate(torch.Generator().manual_seed(1), dtype) if "ragged" in case.label)
    found = [case for case in cases if isinstance(case.args[-1], StateBatch) and not _same_in_pieces(kernel, case)]
    return [Failure(f"{case.label} {case.facts}", f"claims batch invariance, but differs in pieces of {PIECE}") for case in found]


def _same_in_pieces(kernel: Kernel, case: Case) -> bool:
    run = kernel.load(case.facts)
    packed = [run.pack(dict(case.weights))] if has_weights(ALL_OPS[kernel.op]) else []
    whole, alone = (place(case, torch.device("cpu")).case.args for _ in range(2))
    expected, batch, tokens = run.run(*packed, *whole), case.args[-1], case.args[0].shape[0]
    for row, (first, last) in enumerate(pairwise(batch.query_start.tolist())):
        for start in range(first, last, PIECE):
            end = min(start + PIECE, last)
            page = batch.read if start == first else batch.write
            step = StateBatch(
                torch.tensor([0, end - start], dtype=torch.int32), batch.fresh[row : row + 1] & (start == first), page[row : row + 1],
                batch.write[row : row + 1], int(end - start > 1), end - start,
            )  # fmt: skip
            cut = tuple(arg if arg is None or arg.shape[:1] != (tokens,) else arg[start:end] for arg in alone[:-1])
            if not torch.equal(run.run(*packed, *cut, step), expected[start:end]):
                return False
    (pages,) = case.mutates
    return torch.equal(whole[pages].nan_to_num(), alone[pages].nan_to_num())


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
