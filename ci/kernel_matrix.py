"""Writes docs/kernels.md, primitives by backends, from the records that backends offer; `--check` says whether it is stale."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from pagoda.hal.discovery import INSTRUMENTS, find
from pagoda.hal.kernel import Kernel
from pagoda.ops.references import reference_kernels
from pagoda.ops.registry import ALL_OPS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/kernels.md"
HEAD = """# Primitives and backends

Made by `python ci/kernel_matrix.py`; do not edit. Every primitive runs on every backend through its portable reference; a cell names
the kernels that a backend offers besides. Which one a model gets on a device, and why others were passed over, says `pagoda plan`.
What is right is decided by `pagoda conformance --device NAME --level 1`, which runs every one of them against the float64 oracle.
"""


def matrix() -> str:
    """The document."""
    names = [name for name in _backends() if name not in INSTRUMENTS]
    offered = {name: sorted(find(name).kernels(), key=lambda kernel: (kernel.op, kernel.name)) for name in names}
    lines = [HEAD, f"| primitive | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for op in sorted(ALL_OPS):
        lines.append(f"| `{op}` | {' | '.join(_cell(op, offered[name]) for name in names)} |")
    for name in names:
        lines += _details(name, offered[name])
    return "\n".join(lines) + "\n"


def _backends() -> list[str]:
    """Those of this tree: a machine's plugins must not change the document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted(project["entry-points"]["pagoda.backends"])


def _cell(op: str, kernels: list[Kernel]) -> str:
    own = sorted({kernel.name for kernel in (*kernels, *reference_kernels()) if kernel.op == op} - {"reference"})
    return ", ".join([*own, "reference"])


def _details(backend: str, kernels: list[Kernel]) -> list[str]:
    if not kernels:
        return []
    lines = [
        "",
        f"## What the kernels of `{backend}` need and claim",
        "",
        "| primitive | kernel | needs | claims |",
        "| --- | --- | --- | --- |",
    ]
    return lines + [
        f"| `{kernel.op}` | {kernel.name} | {_needs(kernel)} | {', '.join(sorted(kernel.claims)) or '–'} |" for kernel in kernels
    ]


def _needs(kernel: Kernel) -> str:
    needs = kernel.needs
    groups = {
        "": [" or ".join(sorted(needs.archs))] if needs.archs else [],
        "feature ": sorted(feature.value for feature in needs.features),
        "dtype ": [" or ".join(sorted(needs.dtypes))] if needs.dtypes else [],
        "package ": list(needs.packages),
    }
    words = [f"{title}{one}" for title, group in groups.items() for one in group]
    words += [f"{name} in {', '.join(map(str, allowed))}" for name, allowed in needs.facts.items()]
    for arch, facts in needs.facts_on.items():
        words += [f"on {arch} {name} in {', '.join(map(str, allowed))}" for name, allowed in facts.items()]
    return "; ".join(words) or "–"


def main(arguments: list[str]) -> int:
    text = matrix()
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print("docs/kernels.md is stale; run python ci/kernel_matrix.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
