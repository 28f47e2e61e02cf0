"""Writes docs/perf/peers-cpu.md from the comparisons in docs/perf/results/peers-cpu-*.json; `--check` says whether it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

from pagoda.serving.cli.bench.peers.comparison import DISTURBED, Comparison, as_markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs/perf/results"
TARGET = ROOT / "docs/perf/peers-cpu.md"
HEAD = f"""# Pagoda and other engines on a CPU

Made by `python ci/peer_table.py` from `docs/perf/results/peers-cpu-*.json`, the records of `pagoda bench compare-peers`; do not edit.

Values are medians of the turns with the least and the most; *against* is how many times better Pagoda was in the same round. Engines took
turns on an otherwise idle machine under one load generator; only ratios hold on another day. Turns during which others used more than
{DISTURBED} cores are named below their table.
"""


def document() -> str:
    return "\n".join([HEAD, *(_section(path) for path in sorted(RESULTS.glob("peers-cpu-*.json")))])


def _section(path: Path) -> str:
    comparison = Comparison.read(path)
    machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in comparison.machine.items())
    days = sorted(turn["at"] for turn in comparison.turns)
    rounds = len({turn["round"] for turn in comparison.turns})
    when = f"{machine}; {rounds} rounds, {days[0]} to {days[-1]} UTC; `{path.name}`."
    lines = [f"## {comparison.model}", "", when, "", as_markdown(comparison), ""]
    lines += [f"* {name} {about['version']}: `{about['command']}`" for name, about in comparison.engines.items()]
    lines += [f"* disturbed: {', '.join(comparison.disturbed)}"] if comparison.disturbed else []
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    made = document()
    if "--check" not in arguments:
        TARGET.write_text(made, encoding="utf-8")
        return 0
    stale = not TARGET.exists() or TARGET.read_text(encoding="utf-8") != made
    if stale:
        print("docs/perf/peers-cpu.md is stale; run python ci/peer_table.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
