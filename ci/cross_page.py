"""The table of what `cross_compile.py` found: docs/cross-compile.json, and the page that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs/cross-compile.json", ROOT / "docs/cross-compile.md"


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found


def write(target: str, tried: dict[str, Any], kernels: dict[str, Any], order: list[str], keep: bool) -> None:
    """One target's row; other targets keep theirs, and where `keep` says so, other kernels what was tried with them."""
    known = read()["targets"] if DATA.exists() else {}
    before = known.get(target, {"kernels": {}}) if keep else {"kernels": {}}
    known[target] = {**tried, **before, "kernels": {**before["kernels"], **kernels}}
    data = {"triton": triton.__version__, "targets": {name: known[name] for name in order if name in known}}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(data), encoding="utf-8")


def written(data: dict[str, Any]) -> str:
    """The page."""
    targets = {target: row["kernels"] for target, row in data["targets"].items()}
    lines = [
        HEAD.format(version=data["triton"]),
        "| target | what was compiled | programs | when | kernels and uses |",
        "| --- | --- | --- | --- | --- |",
        *(_tried(target, row) for target, row in data["targets"].items()),
        CELLS,
        f"| kernel | {' | '.join(targets)} |",
        "| --- |" + " --- |" * len(targets),
    ]
    names = list(dict.fromkeys(name for row in targets.values() for name in row))
    lines += [f"| `{name}` | {' | '.join(_cell(row.get(name)) for row in targets.values())} |" for name in names]
    return "\n".join(lines) + "\n" + NOTES


def _tried(target: str, row: dict[str, Any]) -> str:
    programs = sum(one["programs"] for one in row["kernels"].values())
    what = f"{'every use' if row['all'] else 'one use of each kernel'} in {', '.join(row['dtypes'])}"
    return f"| {target} | {what} | {programs:,} | {row.get('day', '–')} | {row.get('sources', '–')} |"


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "–"
    if one["problems"]:
        return "**no**" if one["offered"] else "(no)"
    words = [f"{one['programs']}", f"{one['shared'] / 1024:.0f} KiB", *sorted({_short(name) for name in one["matrix"]})]
    for title, wide in (("spills", False), ("float32 spills", True)):
        spilled = [size for where, size in one["spilling"].items() if where.endswith(" float32") == wide]
        words += [f"{title} {max(spilled):,} B"] if spilled else []
    return ", ".join(words) if one["offered"] else f"({', '.join(words)})"


def _short(instruction: str) -> str:
    return "mfma" if "mfma" in instruction else "wmma" if "wmma" in instruction else instruction.split(".")[0]


HEAD = """# Kernels compiled for GPUs that are not here

Made by `python ci/cross_compile.py --all --write` with Triton {version}; do not edit.

What is compiled: every different program (a kernel's function with the types and alignment of its arguments, its constants and its options)
that some use asks for. Uses are those of `ci/cross_shapes.py`, in bfloat16, float16 and float32: heads of 64 to 256 numbers, pages of 64
tokens (in bfloat16 of 16 too), decodes of one and of many requests, drafts, prompts, latents, float8 pages; in 16 bits groups of 1 to 16
query heads, windows, chunks, sinks, soft caps, ALiBi and distance biases; layers and experts of served models at the numbers of rows where
another way begins. Two models that ask for the same program share it. Not among them: other numbers of heads, widths and windows, which are
constants in the same code. Kernels without such a list are compiled for the cases that they are checked with. `make test-kernels` (CI)
compiles one use of each kernel. The last column is a digest of the kernels and of their uses.
"""
CELLS = """
A cell: different programs, most shared memory of one, the kinds of matrix instructions found, and most bytes of a thread's registers that a
program puts into memory (spills). In brackets: it compiles, or not, but the backend does not offer it there, since its ways were not
measured there. –: the device lacks what it needs.
"""
NOTES = """
Every program that is offered compiles, fits into the device's shared memory, and has matrix instructions where it multiplies numbers of 8
or 16 bits. float32 is multiplied without them where a device has none that keep all of its bits (NVIDIA, RDNA).
`docs/cross-compile.json` has the details: which functions spill in which dtype, and which instructions were found.
"""
