"""Compiles every Triton kernel for GPUs that are not here and looks at what came out: `python ci/cross_compile.py [--all] [--targets …]`.

Without --all, one use of each kernel a target, for CI; with it, every use that `cross_shapes.py` knows models to make, in every dtype. With
--write, docs/cross-compile.md and .json say what was found; `--table` makes the page of the JSON again. A kernel must compile, fit into
shared memory, use matrix instructions where it multiplies numbers of 8 or 16 bits, and look for operands where they are (sm90).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cross_page import PAGE, read, write, written
from cross_pool import Pool
from cross_programs import Compilers, Program, Record, Results, asking, compile_all, of_device
from cross_shapes import shapes
from pagoda.hal.discovery import find
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.hal.kernel import Kernel
from pagoda.ops.check import has_weights
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "sm80": ("cuda", "a100"), "sm90": ("cuda", "h100"), "sm100": ("cuda", "b200"), "sm120": ("cuda", "rtx5090"),
    "gfx90a": ("rocm", "mi250x"), "gfx942": ("rocm", "mi300x"), "gfx950": ("rocm", "mi355x"), "gfx1100": ("rocm", "rx7900xtx"),
    "gfx1201": ("rocm", "rx9070xt"),
}  # fmt: skip
PRODUCTS = (
    "act_gemm", "choose_keys", "gemm", "gemm_fp8", "lora_delta", "moe_mlp", "moe_mlp_fp8", "norm_gemm", "paged_attention",
    "segment_attention", "sparse_attention",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Outcome:
    """What became of a kernel on a target.

    Attributes:
        uses: cases that were tried. programs: different compiled programs; spilling: those that keep registers in memory, by function and
            dtype the most bytes of a thread. shared: most bytes of shared memory. matrix: matrix instructions.
        offered: the target's backend offers the kernel there. problems: what went wrong, with a case. seconds: of the compiler.
    """

    offered: bool
    uses: int = 0
    programs: int = 0
    spilling: dict[str, int] = field(default_factory=dict)
    shared: int = 0
    matrix: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def main() -> int:
    options = _options()
    if options.table:
        PAGE.write_text(written(read()), encoding="utf-8")
        return 0
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    processes = Pool(of_device, options.jobs, options.limit) if options.jobs else nullcontext()
    with processes as compilers:
        bad = _compiled_for_all(options, compilers)
    print("\n".join(bad) or f"what is offered on {options.targets} compiles and is as it should be")
    return 1 if bad else 0


def _compiled_for_all(options: argparse.Namespace, compilers: Compilers | None) -> list[str]:
    """The problems of what is offered."""
    bad: list[str] = []
    for target in options.targets.split(","):
        row = compile_for(target, options, compilers)
        bad += [f"{target} {name}: {why} ({case})" for name, one in row.items() for why, case in one.problems.items() if one.offered]
        if options.write:
            tried = {"dtypes": options.dtypes.split(",") if options.all else [*DTYPES[:1]], "all": options.all, **_now()}
            write(target, tried, {name: vars(one) for name, one in row.items()}, list(TARGETS), keep=bool(options.kernel))
    return bad


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--all", action="store_true", help="every configuration")
    parser.add_argument("--kernel", default="", help="this one alone, as paged_attention=triton; the table keeps the others")
    parser.add_argument("--write", action="store_true", help="write the table, after each target")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of --all")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile; 0: this one does")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that a process may take for a program")
    parser.add_argument("--cache", type=Path, help="keep what became of programs in this folder: a later run compiles what has changed")
    parser.add_argument("--table", action="store_true", help="write the page from the JSON beside it, and compile nothing")
    return parser.parse_args()


def _now() -> dict[str, str]:
    """The day, and a digest of the kernels and of their uses."""
    files = sorted([*(ROOT / "ops/triton").glob("*.py"), *(ROOT / "ops/triton").glob("*.json"), *(ROOT / "ci").glob("cross_s*.py")])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return {"day": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "sources": digest}


def described(target: str) -> tuple[DeviceInfo, tuple[Kernel, ...]]:
    """The device that stands for a target, and every Triton kernel there is: a backend may not offer all of them there yet."""
    backend, model = TARGETS[target]
    kernels = (kernel for kernel in find("cuda").kernels() if kernel.implementation.startswith("pagoda.ops.triton."))
    return find(backend).describe(model), tuple(kernels)


def compile_for(target: str, options: argparse.Namespace, compilers: Compilers | None) -> dict[str, Outcome]:
    info, kernels = described(target)
    offered = {(kernel.op, kernel.name) for kernel in find(TARGETS[target][0]).kernels() if kernel.needs.refuse_device(info) is None}
    results = Results(options.cache / f"{target}.jsonl" if options.cache else None)
    row: dict[str, Outcome] = {}
    for kernel in kernels:
        outcome = Outcome((kernel.op, kernel.name) in offered)
        if options.kernel not in ("", f"{kernel.op}={kernel.name}"):
            continue
        if Feature.FP8 not in info.features and Feature.FP8 in kernel.needs.features:
            continue
        began = time.perf_counter()
        _compile_kernel(kernel, info, options, outcome, results, compilers)
        row[f"{kernel.op}={kernel.name}"] = outcome
        print(f"{target} {kernel.op}={kernel.name}: {_words(outcome)} in {time.perf_counter() - began:.0f} s", flush=True)
    return row


def _words(one: Outcome) -> str:
    found = " ".join([*one.matrix, str(one.spilling or ""), str(one.problems or "")])
    return f"{one.uses} uses, {one.programs} programs, {one.shared} bytes shared, {found} compiled in {one.seconds:.0f} s"


def _compile_kernel(
    kernel: Kernel, info: DeviceInfo, options: argparse.Namespace, outcome: Outcome, results: Results, compilers: Compilers | None
) -> None:
    asked: dict[Program, str] = {}
    made: dict[Program, Record] = {}
    for label, case in _uses(kernel, info, options):
        outcome.uses += 1
        try:
            with asking(info, lambda program, label=label: asked.setdefault(program, label)):
                _run(kernel, case)
        except Exception as error:
            outcome.problems.setdefault(f"{type(error).__name__}: {str(error)[-200:]}", f"{label} {case.facts}")
        if not options.all:
            made = compile_all(list(asked), info, results)
            # For CI: something was compiled, and of a product something that multiplies.
            if outcome.problems or any(record.error or record.dots or kernel.op not in PRODUCTS for record in made.values()):
                break
    made = compile_all(list(asked), info, results, compilers)
    outcome.programs = len(made)
    for program, record in made.items():
        _look(program, record, asked[program], info, outcome)
    outcome.matrix.sort()


def _uses(kernel: Kernel, info: DeviceInfo, options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    for dtype in options.dtypes.split(",") if options.all else DTYPES[:1]:
        if dtype not in ALL_OPS[kernel.op].dtypes or dtype not in kernel.needs.dtypes:
            continue
        for case in _cases(kernel.op, dtype) if options.all else _lazily(kernel.op, dtype):
            if kernel.needs.refuse_use(info, case.facts) is None and (kernel.accepts is None or kernel.accepts(case.facts) is None):
                yield f"{dtype}, {case.label}", case


@cache
def _cases(op: str, dtype: str) -> tuple[Case, ...]:
    return tuple(_lazily(op, dtype))


def _lazily(op: str, dtype: str) -> Iterator[Case]:
    """Uses by models, where they are known; the cases that the primitive is checked with elsewhere."""
    found = shapes(op, dtype)
    for case in found if found is not None else ALL_OPS[op].generate(torch.Generator().manual_seed(0), dtype):
        weights = {name: _on_meta(tensor) for name, tensor in case.weights.items()}
        yield replace(case, args=tuple(_on_meta(arg) for arg in case.args), weights=weights)


def _run(kernel: Kernel, case: Case) -> None:
    run = kernel.load(case.facts)
    weights = [run.pack(dict(case.weights))] if has_weights(ALL_OPS[kernel.op]) else []
    args = list(case.args)
    if case.batch is not None:
        args[case.batch + 1] = run.plan(args[case.batch])
    run.run(*weights, *args)


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if is_dataclass(arg) and not isinstance(arg, type):
        return replace(arg, **{part.name: _on_meta(getattr(arg, part.name)) for part in fields(arg)})
    return arg


def _look(program: Program, one: Record, label: str, info: DeviceInfo, outcome: Outcome) -> None:
    outcome.seconds = round(outcome.seconds + one.seconds, 1)
    if one.error:
        outcome.problems.setdefault(one.error, f"{program.name}, {label}")
        return
    outcome.shared = max(outcome.shared, one.shared)
    outcome.matrix = list({*outcome.matrix, *one.matrix})
    if one.narrow and not one.matrix:
        outcome.problems.setdefault(f"{program.name} multiplies without matrix instructions", label)
    if one.strays:
        why = f"{program.name}: ptxas has products look for operands where they are not, at {' '.join(one.strays[:3])}"
        outcome.problems.setdefault(why, label)
    limit = info.limits.shared_memory_bytes
    if one.shared > limit:
        outcome.problems.setdefault(f"{program.name} needs {one.shared} bytes of shared memory of {limit}", label)
    if one.spilled:
        where = f"{program.name} {label.split(',')[0]}"
        outcome.spilling[where] = max(outcome.spilling.get(where, 0), one.spilled)


if __name__ == "__main__":
    sys.exit(main())
