"""The figures of the house style, room by room, and the limits: no function over 80 lines, no file over 400 (kernels: 150 and 800).

What breaks a limit stands in ci/budgets.toml with its reason; anything else fails the check.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("hal", "ops", "backends", "quant", "models", "serving", "tests")
KERNEL_ROOMS = ("ops/native", "ops/triton", "backends/cpu/kernels", "ops/gguf")


@dataclass(frozen=True)
class Function:
    name: str
    lines: int
    lazy_imports: int


@dataclass(frozen=True)
class File:
    path: str
    lines: int
    functions: tuple[Function, ...]

    @property
    def limits(self) -> tuple[int, int]:
        """(function, file)"""
        return (150, 800) if self.path.startswith(KERNEL_ROOMS) or self.path.startswith("tests/") else (80, 400)


def read(path: Path) -> File:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = tuple(Function(n.name, (n.end_lineno or n.lineno) - n.lineno + 1, _lazy(n)) for n in nodes)
    return File(str(path.relative_to(ROOT)), text.count("\n"), functions)


def _lazy(function: ast.AST) -> int:
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function))


def files() -> list[File]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [read(path) for path in [ROOT / "__init__.py", *paths]]


def table(everything: list[File]) -> None:
    print(f"{'room':<10}{'files':>6}{'lines':>8}{'mean':>6}{'longest':>9}   functions: mean  p90  >40  >80   lazy imports")
    for room in ROOMS:
        group = [f for f in everything if f.path.split("/")[0] == room]
        lengths = sorted(fn.lines for f in group for fn in f.functions)
        if not lengths:
            continue
        lazy = sum(fn.lazy_imports for f in group for fn in f.functions)
        print(f"{room:<10}{len(group):>6}{sum(f.lines for f in group):>8}{mean(f.lines for f in group):>6.0f}"
              f"{max(f.lines for f in group):>9}{mean(lengths):>18.1f}{lengths[int(len(lengths) * 0.9)]:>5}"
              f"{sum(n > 40 for n in lengths):>5}{sum(n > 80 for n in lengths):>5}{lazy:>15}")  # fmt: skip


def breaches(everything: list[File]) -> list[tuple[str, str]]:
    found = []
    for file in everything:
        function_limit, file_limit = file.limits
        if file.lines > file_limit:
            found.append((file.path, f"{file.lines} lines, limit {file_limit}"))
        for function in file.functions:
            if function.lines > function_limit:
                found.append((f"{file.path}:{function.name}", f"{function.lines} lines, limit {function_limit}"))
            if function.lazy_imports and not _may_import_late(file, function):
                found.append((f"{file.path}:import", f"import inside {function.name}"))
    return found


def _may_import_late(file: File, function: Function) -> bool:
    """Tests, and the two members of a backend that may bring vendor code in."""
    return file.path.startswith("tests/") or (file.path.endswith("/backend.py") and function.name in ("open", "devices"))


def main() -> int:
    everything = files()
    table(everything)
    allowed = tomllib.loads((ROOT / "ci/budgets.toml").read_text())["allowed"]
    found = breaches(everything)
    unexcused = [(where, what) for where, what in found if where not in allowed]
    for where, what in unexcused:
        print(f"over budget: {where}: {what} (shorten it, or give a reason in ci/budgets.toml)")
    stale = sorted(set(allowed) - {where for where, _ in found})
    for where in stale:
        print(f"stale line in ci/budgets.toml: {where} is within budget")
    print(f"{len(found) - len(unexcused)} excused, {len(unexcused)} over budget")
    return 1 if unexcused or stale else 0


if __name__ == "__main__":
    sys.exit(main())
