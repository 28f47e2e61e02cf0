"""How long the device waits between steps: W1 (one request) and W3 (many, prompts among them), from a profiler's trace."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_profile import kernels_of
from gpu_workloads import DummyEngine
from pagoda.hal.errors import DeviceError
from report_shapes import LONGEST, SHAPES, engine
from torch.profiler import ProfilerActivity, profile

GOALS = {"W1": 0.10, "W3": 0.03}


def idle(options: argparse.Namespace) -> dict[str, Any]:
    """Share of the time in which the device runs nothing, with one request (goal < 10 %) and with many (< 3 %)."""
    half = LONGEST[options.shape] // 16
    vocab, draw, found = SHAPES[options.shape]["vocab_size"], random.Random(1), {}
    with engine(options, max_num_batched_tokens=8192) as running:
        running.settle()
        for name, count, prompt, tokens in (("W1", 1, 128, 256), ("W3", 512, half, half // 2)):
            batches = [[draw.choices(range(10, vocab), k=prompt) for _ in range(count)] for _ in range(3)]
            found[name] = _measure(running, batches, tokens)
            print(f"{name}: {found[name]}", flush=True)
    return {"ok": all(found[name]["idle_share"] < goal for name, goal in GOALS.items()), "goals": GOALS, **found}


def _measure(running: DummyEngine, batches: list[list[list[int]]], tokens: int) -> dict[str, float]:
    running.generate(batches[0], tokens)
    began = time.perf_counter()
    running.generate(batches[1], tokens)
    wall = 1e6 * (time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        running.generate(batches[2], tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.export_chrome_trace(str(path))
        kernels = kernels_of(path)
    if not kernels:
        raise DeviceError("nothing that ran on a device was traced; this part needs a GPU")
    busy, gaps, end = 0.0, [], kernels[0][0]
    for start, length, _ in kernels:
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, start + length - max(end, start))
        end = max(end, start + length)
    # Tracing slows the host, not the kernels: what they do not fill of an untraced run is the share that counts.
    return {
        "wall_ms": wall / 1e3, "busy_ms": busy / 1e3, "idle_share": max(0.0, 1 - busy / wall), "kernels": len(kernels),
        "traced_span_ms": (end - kernels[0][0]) / 1e3, "traced_idle_share": 1 - busy / (end - kernels[0][0]),
        "largest_gap_us": max(gaps, default=0.0), "gaps_over_20_us": sum(gap > 20 for gap in gaps),
    }  # fmt: skip
