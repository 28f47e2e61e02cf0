"""The C++ kernels under sanitizers and on emulated processors: `python ci/native_checks.py sanitized | threads | amx | arm | report`.

`sanitized`: address and undefined behaviour, every level of this processor. `threads`: data races in the pool. `amx`: the tile
products with a model of the instructions. `arm`: every level of
64-bit Arm, cross-compiled, under qemu. `report`: all of them and the plain run, written to docs/vendor/cpu-verified.md; what was run of
these very sources and cases before is not run again, so that a machine with little time can go check by check.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/samples"))

from native_cases import FAMILIES, recordings, write  # noqa: E402
from native_driver import SOURCE, Outcome, Run, compile_driver, run_driver  # noqa: E402
from pagoda.ops.native.build import Toolchain, compile_library, levels, library  # noqa: E402
from pagoda.ops.native.library import here  # noqa: E402

PAGE = ROOT / "docs/vendor/cpu-verified.md"
KEPT = ROOT / "build/native-checks"
ASAN = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
TSAN = ("-O1", "-g1", "-fsanitize=thread", "-fno-openmp")  # OpenMP's own library is not instrumented
ARM = "aarch64-linux-gnu-g++"


@dataclass(frozen=True)
class Check:
    """A build of the library, and the processors that its cases run on: level → the emulator and its options."""

    name: str
    how: str
    tools: Toolchain
    processors: Callable[[], dict[str, tuple[str, ...]]]
    families: tuple[str, ...] = tuple(FAMILIES)


def _own_levels() -> dict[str, tuple[str, ...]]:
    if not here():
        sys.exit("build the library first: python -m pagoda.ops.native.build")
    return dict.fromkeys(here(), ())


def _tiles() -> dict[str, tuple[str, ...]]:
    return {"amx": ()}


def _best_level() -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(list(_own_levels())[:1], ())


def _arm_levels() -> dict[str, tuple[str, ...]]:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None or shutil.which(ARM) is None:
        sys.exit(f"`arm` needs {ARM} and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    return {level: (emulator, "-L", "/usr/aarch64-linux-gnu", "-cpu", _ARM_PROCESSORS[level]) for level in levels("aarch64")}


_ARM_PROCESSORS = {"baseline": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}
"""Processors for which the library must choose just that level."""

CHECKS = {
    "plain": Check("plain", "on hardware", Toolchain("g++"), _own_levels),
    "sanitized": Check("sanitized", "on hardware, address and undefined behaviour sanitizers", Toolchain("g++", flags=ASAN), _own_levels),
    "threads": Check("threads", "on hardware, thread sanitizer", Toolchain("g++", flags=TSAN), _best_level),
    "amx": Check("amx", "on hardware, tile instructions by a model in C++", Toolchain("g++", flags=("-O3", "-DPG_AMX_MODEL")), _tiles),
    "arm": Check("arm", "under qemu", Toolchain(ARM, "aarch64"), _arm_levels),
}


def kept(check: Check) -> Path:
    """Where the outcomes of a check of the sources and cases as they are now are kept."""
    texts = [
        path.read_bytes()
        for path in (SOURCE, *sorted((ROOT / "tests/samples").glob("native_*.py")), *sorted((ROOT / "ops/cases").glob("*.py")))
    ]
    digest = hashlib.sha256(b"".join([library().name.encode(), repr((check.tools, check.families)).encode(), *texts])).hexdigest()
    return KEPT / f"{check.name}-{digest[:12]}.json"


def outcomes_of(check: Check) -> list[Outcome]:
    """Those of an earlier run of the same, else of one now."""
    path = kept(check)
    if not path.exists():
        outcomes = run(check)
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcomes))
    return [Outcome(*outcome) for outcome in json.loads(path.read_text())]


def run(check: Check) -> list[Outcome]:
    """Build, run every case on every level, say what is wrong. Exits where something is."""
    processors = check.processors()
    with tempfile.TemporaryDirectory() as name:
        folder, outcomes, start = Path(name), [], time.perf_counter()
        flags = check.tools.flags or ("-O1",)
        try:
            library = compile_library(check.tools, folder)
            driver = compile_driver(folder, check.tools.compiler, flags)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{check.name}: {error.stderr[-3000:]}")
        write(folder / "cases", list(recordings(check.families)))
        print(f"{check.name}: built in {time.perf_counter() - start:.0f} s", flush=True)
        for level, prefix in processors.items():
            outcomes += _run_level(check, folder, driver, library, level, prefix)
    return outcomes


def _run_level(check: Check, folder: Path, driver: Path, library: Path, level: str, prefix: tuple[str, ...]) -> list[Outcome]:
    start = time.perf_counter()
    # An emulated processor is one that has no better level: there the library chooses.
    result: Run = run_driver(driver, library, folder / "cases", ["best" if prefix else level], prefix)
    problems = result.problems() + [f"{o.level} was chosen, not {level}" for o in result.outcomes[:1] if o.level != level]
    for problem in problems[:20]:
        print(f"  {problem}")
    print(f"  {level}: {len(result.outcomes)} cases in {time.perf_counter() - start:.0f} s, {len(problems)} problems", flush=True)
    if problems:
        sys.exit(1)
    return result.outcomes


def table(check: Check, outcomes: list[Outcome]) -> list[str]:
    """Levels by families: cases, and the largest error in units of what is allowed."""
    names = list(FAMILIES)
    lines = ["", f"## {check.name}: {check.how}", "", f"| level | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for level in dict.fromkeys(outcome.level for outcome in outcomes):
        cells = []
        for family in names:
            mine = [o for o in outcomes if o.level == level and o.family == family]
            cells.append(f"{len(mine)}, {max((o.worst for o in mine), default=0):.2f}" if mine else "–")
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    asked = sys.argv[1:]
    if len(asked) != 1 or asked[0] not in (*CHECKS, "report"):
        sys.exit(__doc__)
    if asked[0] != "report":
        kept(CHECKS[asked[0]]).unlink(missing_ok=True)
        outcomes_of(CHECKS[asked[0]])
        return 0
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    lines = [
        "# What was verified of the CPU kernels, and how",
        "",
        "Made by `python ci/native_checks.py report`; do not edit. A cell: cases of the family, and the largest error among them in units",
        f"of what the float64 oracle's tolerance allows. Machine: {platform.machine()}, {compiler}. Sources: {library().stem}.",
    ]
    for check in CHECKS.values():
        lines += table(check, outcomes_of(check))
    PAGE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
