"""Numbers of benchmarks: percentiles, a table for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

PERCENTILES = (50, 90, 95, 99)


def summary(values: Sequence[float], percents: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Mean and percentiles; {} of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"mean": mean(ordered), **{f"p{p}": percentile(ordered, p) for p in percents}, "max": ordered[-1]}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def middle(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0


def table(title: str, facts: Mapping[str, str], spreads: Mapping[str, Mapping[str, float]]) -> str:
    """Facts one a line, then a row of percentiles for each spread."""
    width = max(map(len, [*facts, *spreads, ""]))
    lines = [title, "─" * len(title), *(f"{name:{width}}  {value}" for name, value in facts.items())]
    shown = {name: spread for name, spread in spreads.items() if spread}
    if shown:
        columns = list(next(iter(shown.values())))
        lines += ["", " " * width + "".join(f"{column:>10}" for column in columns)]
        lines += [f"{name:{width}}" + "".join(f"{spread[column]:10.2f}" for column in columns) for name, spread in shown.items()]
    return "\n".join(lines)


def write_json(path: str | None, result: Mapping[str, Any]) -> None:
    """To a file, or to standard output for "-"."""
    if path is None:
        return
    text = json.dumps(result, indent=2)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")
