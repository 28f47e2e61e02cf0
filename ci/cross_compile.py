"""Compiles every Triton kernel for GPUs that are not here and looks at what came out: `python ci/cross_compile.py [--all] [--targets …]`.

Without --all, one use of each kernel a target, for CI; with it, all cases of the primitives and the shapes of models in every dtype. With
--write, docs/cross-compile.md and .json say what was found; `--table` makes the page of the JSON again. A kernel must compile, fit into
shared memory, and use matrix instructions where it multiplies numbers of 8 or 16 bits.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from cross_shapes import shapes
from pagoda.hal.discovery import find
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.hal.kernel import Kernel
from pagoda.ops.check import has_weights
from pagoda.ops.op import Case
from pagoda.ops.registry import ALL_OPS
from pagoda.ops.triton.absent import Compiled, standing_in
from triton import knobs

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs/cross-compile.json", ROOT / "docs/cross-compile.md"
TARGETS = {
    "sm80": ("cuda", "a100"), "sm90": ("cuda", "h100"), "sm100": ("cuda", "b200"), "sm120": ("cuda", "rtx5090"),
    "gfx90a": ("rocm", "mi250x"), "gfx942": ("rocm", "mi300x"), "gfx950": ("rocm", "mi355x"), "gfx1100": ("rocm", "rx7900xtx"),
    "gfx1201": ("rocm", "rx9070xt"),
}  # fmt: skip
MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma_\w+|v_wmma_\w+")
NARROW_DOT = re.compile(r"tt\.dot.*tensor<[0-9x]+x(?:f16|bf16|f8\w+)>")
PRODUCTS = ("act_gemm", "gemm", "gemm_fp8", "moe_mlp", "moe_mlp_fp8", "norm_gemm", "paged_attention")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Outcome:
    """What became of a kernel on a target.

    Attributes:
        uses: cases that were tried. programs: different compiled programs; spilling: those that keep registers in memory, by function the
            most bytes of a thread. shared: most bytes of shared memory. matrix: matrix instructions.
        offered: the target's backend offers the kernel there. problems: what went wrong, with a case.
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
        PAGE.write_text(page(json.loads(DATA.read_text())), encoding="utf-8")
        return 0
    results: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = options.cache or folder
        for target in options.targets.split(","):
            results[target] = compile_for(target, options)
    ones = [(f"{target} {name}", one) for target, row in results.items() for name, one in row.items()]
    bad = [f"{where}: {why} ({case})" for where, one in ones for why, case in one.problems.items() if one.offered]
    print("\n".join(bad) or f"what {len(results)} targets are offered compiles and is as it should be ({len(ones)} kernels)")
    if options.write:
        _write(results, options)
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--all", action="store_true", help="every configuration")
    parser.add_argument("--kernel", default="", help="this one alone, as paged_attention=triton; the table keeps the others")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="of --all")
    parser.add_argument("--cache", help="keep what was compiled in this folder")
    parser.add_argument("--table", action="store_true", help="write the page from the JSON beside it, and compile nothing")
    return parser.parse_args()


def described(target: str) -> tuple[DeviceInfo, tuple[Kernel, ...]]:
    """The device that stands for a target, and every Triton kernel there is: a backend may not offer all of them there yet."""
    backend, model = TARGETS[target]
    kernels = (kernel for kernel in find("cuda").kernels() if kernel.implementation.startswith("pagoda.ops.triton."))
    return find(backend).describe(model), tuple(kernels)


def compile_for(target: str, options: argparse.Namespace) -> dict[str, Outcome]:
    info, kernels = described(target)
    offered = {(kernel.op, kernel.name) for kernel in find(TARGETS[target][0]).kernels() if kernel.needs.refuse_device(info) is None}
    row: dict[str, Outcome] = {}
    for kernel in kernels:
        outcome = Outcome((kernel.op, kernel.name) in offered)
        if options.kernel not in ("", f"{kernel.op}={kernel.name}"):
            continue
        if Feature.FP8 not in info.features and Feature.FP8 in kernel.needs.features:
            continue
        began = time.perf_counter()
        _compile_kernel(kernel, info, options, outcome)
        outcome.seconds = round(time.perf_counter() - began, 1)
        row[f"{kernel.op}={kernel.name}"] = outcome
        print(f"{target} {kernel.op}={kernel.name}: {_words(outcome)}", flush=True)
    return row


def _words(one: Outcome) -> str:
    found = " ".join([*one.matrix, str(one.spilling or ""), str(one.problems or "")])
    return f"{one.uses} uses, {one.programs} programs, {one.shared} bytes shared, {found} in {one.seconds} s"


def _compile_kernel(kernel: Kernel, info: DeviceInfo, options: argparse.Namespace, outcome: Outcome) -> None:
    programs: dict[str, tuple[Compiled, str]] = {}
    for label, case in _uses(kernel, options):
        if not options.all and _enough(kernel, outcome, programs):
            break
        outcome.uses += 1
        try:
            with standing_in(info, lambda one, label=label: programs.setdefault(one.key, (one, label))):
                _run(kernel, case)
        except Exception as error:
            outcome.problems.setdefault(f"{type(error).__name__}: {str(error)[-200:]}", f"{label} {case.facts}")
    outcome.programs = len(programs)
    for one, label in programs.values():
        _look(one, label, info, outcome)
    outcome.matrix.sort()


def _uses(kernel: Kernel, options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    op = ALL_OPS[kernel.op]
    for dtype in options.dtypes.split(",") if options.all else DTYPES[:1]:
        if dtype not in op.dtypes or dtype not in kernel.needs.dtypes:
            continue
        for case in (*(shapes(kernel.op, dtype)), *op.generate(torch.Generator().manual_seed(0), dtype)):
            if kernel.accepts is None or kernel.accepts(case.facts) is None:
                yield f"{dtype}, {case.label}", case


def _enough(kernel: Kernel, outcome: Outcome, programs: dict[str, tuple[Compiled, str]]) -> bool:
    """For CI: something was compiled, and of a product something that multiplies."""
    texts = (one.files["ttir"].read_text() for one, _ in programs.values())
    return bool(outcome.problems) or any(kernel.op not in PRODUCTS or "tt.dot" in text for text in texts)


def _run(kernel: Kernel, case: Case) -> None:
    run = kernel.load(case.facts)
    weights = [run.pack({name: _on_meta(tensor) for name, tensor in case.weights.items()})] if has_weights(ALL_OPS[kernel.op]) else []
    args = [_on_meta(arg) for arg in case.args]
    if case.batch is not None:
        args[case.batch + 1] = run.plan(args[case.batch])
    run.run(*weights, *args)


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if is_dataclass(arg) and not isinstance(arg, type):
        return replace(arg, **{part.name: _on_meta(getattr(arg, part.name)) for part in fields(arg)})
    return arg


def _look(one: Compiled, label: str, info: DeviceInfo, outcome: Outcome) -> None:
    """What the compiled text and binary say."""
    outcome.shared = max(outcome.shared, one.shared)
    text = one.files["ptx" if "ptx" in one.files else "amdgcn"].read_text()
    matrix = set(MATRIX.findall(text))
    outcome.matrix = list(set(outcome.matrix) | matrix)
    if not matrix and NARROW_DOT.search(one.files["ttir"].read_text()):
        outcome.problems.setdefault(f"{one.function} multiplies without matrix instructions", label)
    if one.shared > info.limits.shared_memory_bytes:
        outcome.problems.setdefault(f"{one.function} needs {one.shared} bytes of shared memory of {info.limits.shared_memory_bytes}", label)
    spilled = _spilled(one, text)
    if spilled:
        outcome.spilling[one.function] = max(outcome.spilling.get(one.function, 0), spilled)


def _spilled(one: Compiled, text: str) -> int:
    """Bytes of memory that a thread has for what its registers do not hold."""
    if "cubin" not in one.files:
        return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)[1])  # type: ignore[index]
    told = subprocess.run([knobs.nvidia.cuobjdump.path, "-res-usage", one.files["cubin"]], capture_output=True, text=True, check=True)
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", told.stdout + told.stderr))


def _write(results: dict[str, dict[str, Outcome]], options: argparse.Namespace) -> None:
    """Targets and kernels that were not asked for keep what is known of them."""
    known = json.loads(DATA.read_text())["targets"] if DATA.exists() else {}
    tried: dict[str, Any] = {"dtypes": options.dtypes.split(",") if options.all else [*DTYPES[:1]], "all": options.all}
    rows = {}
    for target, row in results.items():
        before = known.get(target, {"kernels": {}}) if options.kernel else {"kernels": {}}
        rows[target] = {**tried, **before, "kernels": {**before["kernels"], **{name: vars(one) for name, one in row.items()}}}
    data = {"triton": triton.__version__, "targets": {name: (known | rows)[name] for name in TARGETS if name in known | rows}}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


def page(data: dict[str, Any]) -> str:
    """The document."""
    targets = {target: row["kernels"] for target, row in data["targets"].items()}
    tried = [
        f"{target}: {'all uses' if row['all'] else 'one use of each'} in {', '.join(row['dtypes'])}"
        for target, row in data["targets"].items()
    ]
    lines = [
        HEAD.format(version=data["triton"], tried="; ".join(tried)),
        f"| kernel | {' | '.join(targets)} |",
        "| --- |" + " --- |" * len(targets),
    ]
    names = list(dict.fromkeys(name for row in targets.values() for name in row))
    lines += [f"| `{name}` | {' | '.join(_cell(row.get(name)) for row in targets.values())} |" for name in names]
    return "\n".join(lines) + "\n" + NOTES


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "–"
    if one["problems"]:
        return "**no**" if one["offered"] else "(no)"
    words = [f"{one['programs']}", f"{one['shared'] / 1024:.0f} KiB", *sorted({_short(name) for name in one["matrix"]})]
    words += [f"stack {max(one['spilling'].values())} B"] if one["spilling"] else []
    return ", ".join(words) if one["offered"] else f"({', '.join(words)})"


def _short(instruction: str) -> str:
    return "mfma" if "mfma" in instruction else "wmma" if "wmma" in instruction else instruction.split(".")[0]


HEAD = """# Kernels compiled for GPUs that are not here

Made by `python ci/cross_compile.py --all --write` with Triton {version}; do not edit. A cell: different programs that were compiled, most
shared memory of one, the kinds of matrix instructions found, and the largest stack of a thread where registers did not suffice. In
brackets: it compiles, or not, but the backend does not offer it there, since its ways were not measured there. –: the device lacks what it
needs.

What was tried: {tried}.
"""
NOTES = """
Every program that is offered compiles, fits into the device's shared memory, and has matrix instructions where it multiplies numbers of 8
or 16 bits.
`docs/cross-compile.json` has the details: which functions keep what on a stack, and which instructions were found.
"""

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "ci"))
    sys.exit(main())
