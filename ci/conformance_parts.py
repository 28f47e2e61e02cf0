"""The conformance suite in parts, a process each, for devices whose runtime keeps all that it ever compiled; one report of all of them.

    python ci/conformance_parts.py --device tpu --out docs/vendor/tpu-conformance [--level N]… [--check TEXT]…

Writes OUT.json and OUT.md after every part. What OUT.json says of checks that were not asked for stays, if the tree still has them; what
nobody has run yet is not shown. A process that ends before its report is there is a failure of its checks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from pagoda.serving.conformance.levels import all_checks, open_target
from pagoda.serving.conformance.report import LEVELS, Outcome, Report, Result

TOGETHER = (100, 2, 100, 100, 12, 2)
"""Checks that a process runs, by level: of models those of two, as they share what is compiled; of engines two, whose programs take
24,000 memory mappings each of the 65,530 that Linux gives a process: with a third the compiler ends it."""

NOT_RUN = "not run yet"
Named = tuple[int, str]
"""A check: its level and name."""


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    if asked.names:
        for check in all_checks(open_target(asked.device), range(len(LEVELS))):
            print(check.level, check.name)
        return 0
    named = _named(asked.device)
    wanted = [
        (level, name)
        for level, name in named
        if (not asked.level or level in asked.level) and (not asked.check or any(text in name for text in asked.check))
    ]
    file = Path(f"{asked.out}.json")
    report = begun(asked.device, named, Report.from_json(file.read_text(encoding="utf-8")) if file.exists() else None)
    for part in _parts(wanted):
        report = report.joined(_run(asked.device, part))
        file.write_text(report.to_json(), encoding="utf-8")
        file.with_suffix(".md").write_text(report.to_markdown(), encoding="utf-8")
    bad = [one for one in report.results if (one.level, one.name) in wanted and one.outcome in (Outcome.FAILED, Outcome.SKIPPED)]
    return 1 if bad or not wanted else 0


def empty(device: str, named: list[Named]) -> Report:
    """Of which nothing is shown yet."""
    results = [Result(level, name, Outcome.SKIPPED, NOT_RUN) for level, name in named]
    return Report(device, {}, {}, tuple(sorted({level for level, _ in named})), results)


def begun(device: str, named: list[Named], earlier: Report | None) -> Report:
    """What is known before anything has run: of the checks in `named`, what `earlier` says. Kernels are listed by what runs."""
    report = empty(device, named)
    if earlier is None:
        return report
    known = [one for one in earlier.results if (one.level, one.name) in named]
    return report.joined(replace(earlier, kernels={}, levels=(), results=known))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, help="the report, without its ending")
    parser.add_argument("--level", type=int, action="append")
    parser.add_argument("--check", action="append", help="only checks with this in their name")
    parser.add_argument("--names", action="store_true", help="print level and name of each check")
    return parser


def _named(device: str) -> list[Named]:
    """All checks, by a process of their own: opening the device here would keep its memory."""
    found = subprocess.run([sys.executable, __file__, "--device", device, "--names"], stdout=subprocess.PIPE, text=True, check=True)
    lines = (line.partition(" ") for line in found.stdout.splitlines() if line[:1].isdigit())
    return [(int(level), name) for level, _, name in lines]


def _parts(checks: list[Named]) -> Iterator[list[Named]]:
    for level, group in groupby(checks, lambda check: check[0]):
        mine, size = list(group), TOGETHER[level]
        for at in range(0, len(mine), size):
            yield mine[at : at + size]


def _run(device: str, part: list[Named]) -> Report:
    """Its report; what a process that has ended too soon has left is run again check by check."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pagoda.serving.cli.main", "conformance", "--device", device, "--level", str(part[0][0])]
        ended = subprocess.run([*command, *(f"--check={name}" for _, name in part), "--json", str(file)], check=False)
        report = Report.from_json(file.read_text(encoding="utf-8")) if file.exists() else empty(device, part)
    left = [(one.level, one.name) for one in report.results if one.detail == NOT_RUN]
    if left and len(part) == 1:
        ((level, name),) = left
        lost = Result(level, name, Outcome.FAILED, f"its process ended with {ended.returncode} before it could report")
        return report.joined(Report(device, {}, {}, (level,), [lost]))
    for check in left:
        report = report.joined(_run(device, [check]))
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
