"""The record of a comparison: turns as they were taken, kept in a file; values and ratios with their spreads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.bench.peers.rows import ROWS, Row

US = "pagoda"
DISTURBED = 0.2
"""Cores that others used during a turn, above which its values are marked."""


class Spread(NamedTuple):
    """Median and ends."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        digits = 0 if self.middle >= 100 else 1 if self.middle >= 20 else 2
        return f"{self.middle:,.{digits}f} [{self.low:,.{digits}f}–{self.high:,.{digits}f}]"


@dataclass
class Comparison:
    """What `--json` holds. A turn is {"engine", "round", "at", "others", "values"}; engines are {"version", "command"} by name."""

    model: str
    machine: Mapping[str, Any]
    engines: dict[str, dict[str, str]]
    turns: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Comparison:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return cls(record["model"], record["machine"], record["engines"], record["turns"])
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path} is no record of compare-peers ({error}); name another file") from error

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"kind": "compare-peers", **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    def missing(self, engine: str, number: int, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Those of `rows` that an engine has not measured in a round; none when only what comes with any turn is left."""
        lacking = [row for row in rows if number not in self.values(engine, row)]
        return tuple(row for row in rows if row in lacking or row.load is None) if any(row.load for row in lacking) else ()

    def values(self, engine: str, row: Row) -> dict[int, float]:
        """By round; several turns of a round count as one."""
        found: dict[int, float] = {}
        for turn in self.turns:
            if turn["engine"] == engine and row.name in turn["values"]:
                value, number = turn["values"][row.name], turn["round"]
                found[number] = max(value, found.get(number, value)) if row.name == "memory" else value
        return found

    def ratios(self, peer: str, row: Row) -> Spread | None:
        """How many times better Pagoda is, in rounds that have both; None where there is none."""
        ours, theirs = self.values(US, row), self.values(peer, row)
        both = [(ours[n], theirs[n]) for n in ours if n in theirs]
        return Spread.of([(peer_ / us if row.less else us / peer_) for us, peer_ in both]) if both else None

    @property
    def disturbed(self) -> list[str]:
        return [f"{turn['engine']} {turn['round'] + 1}" for turn in self.turns if turn["others"] > DISTURBED]


def cells(comparison: Comparison) -> list[list[str]]:
    """A header, then a line a row: each engine's value, then Pagoda's ratio to each peer."""
    names = list(comparison.engines)
    peers = [name for name in names if name != US]
    lines = [["", *names, *(f"against {peer}" for peer in peers)]]
    for row in ROWS:
        found = [comparison.values(name, row) for name in names]
        if any(found):
            ratios = [comparison.ratios(peer, row) for peer in peers]
            shown = [str(Spread.of(list(values.values()))) if values else "–" for values in found]
            lines.append([row.title, *shown, *(f"{ratio}×" if ratio else "–" for ratio in ratios)])
    return lines


def as_text(comparison: Comparison) -> str:
    """For a terminal."""
    lines = cells(comparison)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines]
    marks = [f"others were at work during: {', '.join(comparison.disturbed)}"] if comparison.disturbed else []
    return "\n".join([*text, "", "median [least–most] of the turns; ratios above 1 are in Pagoda's favour, turn by turn", *marks])


def as_markdown(comparison: Comparison) -> str:
    """For a document."""
    header, *lines = cells(comparison)
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *lines])
