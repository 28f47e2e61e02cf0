"""What conformance asks of Triton's compiler: programs of each kernel's cases, and what one costs, for a GPU that is not here.

    python ci/conformance_programs.py [--target sm90] [--kernel paged_attention=triton] [--sample 6] [--cache DIR] [--json FILE]

Cases run on meta tensors and compile nothing; of the programs that they ask for a sample of each kernel and dtype is compiled, which says
how many seconds of one core level 1 needs. `alike` are programs that differ from another one only in what their integers and pointers
happen to be divisible by, or in being one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cross_compile import TARGETS, _on_meta, _run, described
from cross_programs import Program, Results, asking, compile_all
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kernel import Kernel
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS


class Row(NamedTuple):
    """A kernel in a dtype: cases that it takes, groups of them with equal facts, programs, and seconds of the compiler for all."""

    kernel: str
    dtype: str
    cases: int
    facts: int
    programs: int
    alike: int
    seconds: float
    making: float
    functions: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm90", choices=TARGETS)
    parser.add_argument("--kernel", default="")
    parser.add_argument("--sample", type=int, default=6, help="programs of a kernel and dtype that are compiled; 0: none")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    info, kernels = described(options.target)
    results = Results(options.cache / f"{options.target}.jsonl" if options.cache else None)
    rows: list[Row] = []
    print("kernel, dtype: cases, facts, programs, alike, s of the compiler, s to make the cases")
    for kernel in kernels:
        if options.kernel not in ("", f"{kernel.op}={kernel.name}") or kernel.needs.refuse_device(info) is not None:
            continue
        for dtype in ALL_OPS[kernel.op].dtypes:
            if dtype in kernel.needs.dtypes:
                rows.append(_row(kernel, dtype, info, options.sample, results))
                print(*rows[-1], flush=True)
                if options.json:
                    options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    print(f"{sum(row.programs for row in rows)} programs, {sum(row.seconds for row in rows):.0f} s of one core")


def _row(kernel: Kernel, dtype: str, info: DeviceInfo, sample: int, results: Results) -> Row:
    began = time.perf_counter()
    cases = list(ALL_OPS[kernel.op].generate(torch.Generator().manual_seed(0), dtype))
    made = time.perf_counter() - began
    taken = [case for case in cases if kernel.refuse(info, case.facts) is None]
    asked: dict[Program, None] = {}
    with asking(info, lambda program: asked.setdefault(program)):
        for case in taken:
            for one in (case, *_parts(kernel, case)):
                _run(kernel, _as_placed(one))
    functions: dict[str, int] = {}
    for program in asked:
        functions[program.name] = functions.get(program.name, 0) + 1
    chosen = list(asked)[:: max(1, len(asked) // sample)] if sample else []
    records = compile_all(chosen, info, results)
    seconds = sum(record.seconds for record in records.values()) / max(len(records), 1) * len(asked)
    facts, alike = len({repr(case.facts) for case in taken}), len(asked) - len({_coarse(program) for program in asked})
    return Row(f"{kernel.op}={kernel.name}", dtype, len(taken), facts, len(asked), alike, round(seconds, 1), round(made, 1), functions)


def _parts(kernel: Kernel, case: Case) -> Iterator[Case]:
    """What the check of batch invariance runs too."""
    if "batch_invariant" in kernel.claims and not case.mutates:
        yield from (part.case for part in ALL_OPS[kernel.op].split(case))


def _as_placed(case: Case) -> Case:
    weights = {name: _on_meta(tensor) for name, tensor in case.weights.items()}
    return replace(case, args=tuple(map(_on_meta, case.args)), weights=weights)


def _coarse(program: Program) -> str:
    """The program without what its arguments are divisible by, and with every integer's type alike."""
    rest: dict[str, Any] = json.loads(program.rest)
    rest.pop("key", None)
    return json.dumps([program.name, {k: v for k, v in rest.items() if not k.startswith("attrs")}], sort_keys=True)


if __name__ == "__main__":
    main()
