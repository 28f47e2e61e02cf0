"""Compiles tests/native/driver.cpp and runs cases through it: what came of each, level by level."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from native_cases import members

SOURCE = Path(__file__).resolve().parent.parent / "native/driver.cpp"


class Outcome(NamedTuple):
    """What came of a case on a level; `worst`: largest error in units of what is allowed."""

    level: str
    case: str
    verdict: str
    worst: float = 0.0

    @property
    def good(self) -> bool:
        return self.verdict == "ok"

    @property
    def family(self) -> str:
        return self.case.split()[0]


class Run(NamedTuple):
    """All outcomes of a run, and what was said beside them (a sanitizer's report)."""

    outcomes: list[Outcome]
    code: int
    said: str

    def problems(self) -> list[str]:
        bad = [f"{o.level} {o.case}: {o.verdict}" for o in self.outcomes if not o.good]
        return bad or ([f"exit {self.code}: {self.said[:4000]}"] if self.code or self.said.strip() else [])


def compile_driver(folder: Path, compiler: str = "g++", flags: Sequence[str] = ("-O1",)) -> Path:
    """The driver, which knows the functions that the header declares now."""
    (folder / "members.inc").write_text("".join(f"PG_MEMBER({name})\n" for name in members()))
    target = folder / "driver"
    command = [compiler, "-std=c++17", "-Wall", *flags, f"-I{folder}", str(SOURCE), "-ldl", "-pthread", "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def run_driver(driver: Path, library: Path, cases: Path, levels: Sequence[str], prefix: Sequence[str] = ()) -> Run:
    """All cases on all levels. `prefix`: an emulator and its options."""
    command = [*prefix, str(driver), str(library), str(cases), *levels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    outcomes = []
    for line in done.stdout.splitlines():
        level, case, verdict, *worst = line.split("\t")
        outcomes.append(Outcome(level, case, verdict, float(worst[0]) if worst else 0.0))
    return Run(outcomes, done.returncode, done.stderr)
