"""A decode step's time against the bytes it must read, 1 to 32 requests of 128 to 8,192 tokens, on the CPU: `python benchmarks/growth.py`.

Steps are given to the runner itself: rows whose block tables walk through a pool that was written to, more than any cache holds. No prompt
is run, so that all 36 points take a few minutes. Each is written to docs/perf/results/growth-cpu.json as soon as it is known, and not
measured again: a run that was cut short (`--seconds`) goes on where it was. docs/perf/growth-cpu.svg is the plot.

Bytes: weights, once, and the keys and values of all rows. Two lines are laid through the points by their relative errors: a + bytes / rate,
and a + b · requests + bytes / rate, since each request has computing of its own. The worst point of each is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pagoda.backends.torch_host import machine
from pagoda.hal.comm import Topology
from pagoda.serving.engine.build import build_runner
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import Admission, StepPlan
from pagoda.serving.engine.runner import Runner

PERF = Path(__file__).resolve().parent.parent / "docs/perf"
RESULTS, PLOT = PERF / "results/growth-cpu.json", PERF / "growth-cpu.svg"
ROWS, CONTEXTS = (1, 2, 4, 8, 16, 32), (128, 512, 1024, 2048, 4096, 8192)


class Point(NamedTuple):
    """A step of `rows` requests with `context` tokens each; `kv` bytes of keys and values are read beside the weights."""

    rows: int
    context: int
    weights: int
    kv: int
    ms: float

    @property
    def gigabytes(self) -> float:
        return (self.weights + self.kv) / 1e9


class Line(NamedTuple):
    """`start` ms + `row` ms a request + `gigabyte` ms a gigabyte; `worst`: the point that is farthest off, and by which part."""

    start: float
    row: float
    gigabyte: float
    worst: tuple[int, int, float]

    def __str__(self) -> str:
        rows, context, off = self.worst
        a_row = f" + {self.row:.2f} ms a request" if self.row else ""
        return f"{self.start:.1f} ms{a_row} + bytes at {1e3 / self.gigabyte:.1f} GB/s; {rows} × {context} is {off:+.0%} off"


def step_of(runner: Runner, rows: int, context: int, admitted: bool) -> StepPlan:
    """One token for each row; its pages follow each other through the pool."""
    ones, zeros = np.ones(rows, np.int32), np.zeros(rows, np.int32)
    tables = []
    for width in runner.pages.table_widths(context):
        pages = 1 + np.arange(rows * width) % (runner.facts.num_pages - 1)
        tables.append(pages.reshape(rows, width).astype(np.int32))
    slots = np.arange(rows, dtype=np.int32)
    greedy = SamplingParams(temperature=0)
    admissions = tuple(Admission(slot, greedy, (0,)) for slot in range(rows)) if admitted else ()
    return StepPlan(0, slots, ones * (context - 1), ones, zeros, tuple(tables), ones > 0, zeros > 0, zeros, admissions)


def measure(runner: Runner, rows: int, context: int, rounds: int) -> Point:
    runner.run(step_of(runner, rows, context, True))
    plan, times = step_of(runner, rows, context, False), []
    runner.run(plan)
    for _ in range(rounds):
        start = time.perf_counter()
        runner.run(plan)
        times.append(time.perf_counter() - start)
    per_token = sum(group.used_bytes // group.tokens_per_page for group in runner.pages.groups)
    return Point(rows, context, runner.facts.weight_bytes, rows * context * per_token, round(1e3 * statistics.median(times), 3))


def grow(options: argparse.Namespace, found: dict[str, Any]) -> None:
    began = time.perf_counter()
    config = EngineConfig(
        model=options.model, device="cpu", dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype, max_num_seqs=max(ROWS),
        max_model_len=max(CONTEXTS), kv_cache_memory_bytes=options.pool << 20, max_num_batched_tokens=512,
    )  # fmt: skip
    runner = build_runner(config, Topology(0, 1))
    assert runner.pages.pool is not None
    runner.pages.pool.fill_(0x3C)  # real memory, numbers of ordinary size
    have = {(point.rows, point.context) for point in points_of(found)}
    for context in CONTEXTS:
        for rows in ROWS:
            if (rows, context) in have or time.perf_counter() - began > options.seconds:
                continue
            point = measure(runner, rows, context, options.rounds)
            found["points"].append(point._asdict())
            print(f"{rows:3} × {context:5}: {point.gigabytes:7.3f} GB in {point.ms:9.3f} ms", flush=True)
            save(found)


def points_of(found: dict[str, Any]) -> list[Point]:
    return [Point(**point) for point in found["points"]]


def save(found: dict[str, Any]) -> None:
    points = points_of(found)
    found["at"] = datetime.now(UTC).isoformat(timespec="seconds")
    if len(points) > 3:
        found["fits"] = {name: line_of(points, by_row)._asdict() for name, by_row in (("bytes", False), ("requests and bytes", True))}
        PLOT.write_text(draw(found))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def line_of(points: list[Point], by_row: bool) -> Line:
    """Least squares of the relative errors; `by_row`: with a term for each request."""
    columns = np.array([(1.0, p.rows if by_row else 0.0, p.gigabytes) for p in points])
    ms = np.array([p.ms for p in points])
    found, *_ = np.linalg.lstsq(columns / ms[:, None], np.ones(len(ms)), rcond=None)
    off = ms / (columns @ found) - 1
    worst = points[int(np.argmax(np.abs(off)))]
    return Line(*(float(term) for term in found), (worst.rows, worst.context, float(off[np.argmax(np.abs(off))])))


COLOURS = dict(zip(ROWS, ("#0b3c5d", "#328cc1", "#1d8a5b", "#d9a404", "#d2691e", "#a8201a"), strict=True))


def draw(found: dict[str, Any]) -> str:
    points = points_of(found)
    line = line_of(points, False)
    right, top = max(p.gigabytes for p in points) * 1.05, max(p.ms for p in points) * 1.08
    place = lambda x, y: (60 + 560 * x / right, 340 - 310 * y / top)  # noqa: E731
    marks = []
    for tick in range(6):
        x, y = tick * right / 5, tick * top / 5
        marks.append(f'<text x="{place(x, 0)[0]:.0f}" y="358" text-anchor="middle">{x:.1f}</text>')
        marks.append(f'<text x="52" y="{place(0, y)[1] + 4:.0f}" text-anchor="end">{y:.0f}</text>')
    (x0, y0), (x1, y1) = place(0, max(0.0, line.start)), place(right, line.start + line.gigabyte * right)
    marks.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="#999" stroke-dasharray="4 3" fill="none"/>')
    for p in points:
        x, y = place(p.gigabytes, p.ms)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[p.rows]}">')
        marks.append(f"<title>{p.rows} × {p.context}, {p.gigabytes:.3f} GB: {p.ms} ms</title></circle>")
    for index, rows in enumerate(ROWS):
        marks.append(f'<circle cx="76" cy="{36 + 16 * index}" r="4" fill="{COLOURS[rows]}"/>')
        marks.append(f'<text x="86" y="{40 + 16 * index}">{rows} requests</text>')
    title = f"Decode step, {found['model']}: {line}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 390" font-family="sans-serif" font-size="11">'
        f'<rect width="640" height="390" fill="#fff"/><text x="60" y="18" font-size="12">{title}</text>'
        f'<path d="M60 30V340H620" stroke="#333" fill="none"/>{"".join(marks)}'
        '<text x="340" y="380" text-anchor="middle">GB read by a step (weights, keys and values)</text>'
        '<text x="16" y="190" transform="rotate(-90 16 190)" text-anchor="middle">ms</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--pool", type=int, default=1024, help="MiB of KV pages")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no point after that")
    options = parser.parse_args()
    name = f"{Path(options.model).name}, {options.dtype}, KV {options.kv_cache_dtype}"
    _, processor = machine.processor()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if found.get("model") != name or found.get("processor") != processor:
        found = {"model": name, "processor": processor, "threads": torch.get_num_threads(), "points": []}
    grow(options, found)
    print(f"{len(found['points'])} of {len(ROWS) * len(CONTEXTS)} points in {RESULTS.name}")
    if "fits" in found:
        for by_row in (False, True):
            print(line_of(points_of(found), by_row))


if __name__ == "__main__":
    main()
