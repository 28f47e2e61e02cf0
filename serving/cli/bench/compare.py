"""`pagoda bench compare A.json B.json`: the numbers of two results beside each other, with their ratios as bars."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pagoda.hal.errors import ConfigError
from pagoda.serving.cli.bench.report import middle, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.engine.config import Flag

WIDTH = 30
"""Letters of a bar that means twice as much."""
SETTINGS = ("options", "load", "engine", "pagoda", "model", "kind", "date")
"""Parts of a result that are no measurement."""


@dataclass(frozen=True)
class CompareOptions:
    """What is made of it."""

    only: Annotated[str, Flag("Compare only numbers with this in their name.", section="Benchmark")] = ""
    plot: Annotated[str | None, Flag("Draw the ratios as an SVG picture.", metavar="FILE")] = None
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None


class Row(NamedTuple):
    """A number that both results have."""

    name: str
    a: float
    b: float

    @property
    def ratio(self) -> float:
        return self.b / self.a


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench compare", "Two results of one benchmark beside each other.", "A.json B.json [options]", words=2)
    parser.add_config(CompareOptions)
    values = parser.values(argv)
    files = values.pop("words", [])
    if len(files) != 2:
        raise ConfigError(f"{len(files)} results were given; name two, as in pagoda bench compare before.json after.json")
    options, (a, b) = build(CompareOptions, values), map(_numbers, files)
    rows = [Row(name, a[name], b[name]) for name in a if name in b and a[name] and options.only in name]
    if not rows:
        raise ConfigError(
            f"{files[0]} and {files[1]} have no number in common" + (f" with {options.only!r} in its name" * bool(options.only))
        )
    if options.json != "-":
        print("\n".join(_lines(rows, files)))
    if options.plot is not None:
        Path(options.plot).write_text(picture(rows, files), encoding="utf-8")
    write_json(
        options.json, {"kind": "compare", "a": files[0], "b": files[1], "rows": [{**row._asdict(), "ratio": row.ratio} for row in rows]}
    )
    return 0


def _numbers(path: str) -> dict[str, float]:
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file that pagoda bench wrote with --json") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}; give a file that pagoda bench wrote with --json") from error
    return dict(_flat(result, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Numbers by the path to them; of a list of numbers the middle one."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name or key not in SETTINGS:
                yield from _flat(inner, f"{name} {key}".strip())
    elif isinstance(value, list):
        numbers = [float(x) for x in value if isinstance(x, int | float) and not isinstance(x, bool)]
        if numbers and len(numbers) == len(value):
            yield f"{name} (median)", middle(numbers)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _lines(rows: Sequence[Row], files: Sequence[str]) -> Iterator[str]:
    width = max(len(row.name) for row in rows)
    yield f"{'':{width}}  {'A':>12} {'B':>12} {'B / A':>7}   A is {files[0]}, B is {files[1]}"
    for row in rows:
        bar = "█" * max(1, min(2 * WIDTH, round(row.ratio * WIDTH / 2)))
        yield f"{row.name:{width}}  {row.a:12.4g} {row.b:12.4g} {row.ratio:7.3f}   {bar}"


def picture(rows: Sequence[Row], files: Sequence[str]) -> str:
    """Ratios as bars, with a line where both are equal."""
    high, left, scale = 22, 330, 200
    widest = left + int(scale * min(4.0, max(2.0, *(row.ratio for row in rows)))) + 80
    title = html.escape(f"{files[1]} / {files[0]}")
    parts = [f'<text x="8" y="16" font-weight="bold">{title}</text>']
    for place, row in enumerate(rows):
        y, length = 28 + place * high, scale * min(4.0, max(0.0, row.ratio))
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{html.escape(row.name)}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{high - 6}" fill="#3b7dd8"/>')
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 13}">{row.ratio:.3f}</text>')
    bottom = 28 + len(rows) * high
    parts.append(f'<line x1="{left + scale}" y1="22" x2="{left + scale}" y2="{bottom}" stroke="#888" stroke-dasharray="4 3"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest}" height="{bottom + 8}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, *parts, "</svg>", ""])
