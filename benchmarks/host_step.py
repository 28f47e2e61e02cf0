"""Host work of one decode step: plan + pack + commit on the null device, which computes nothing.

    python benchmarks/host_step.py                      the table: requests 1 … 1024, pools of 1 k and 100 k pages
    python benchmarks/host_step.py --profile            where the time of a step of 256 requests goes
    python benchmarks/host_step.py --json FILE          the same figures as JSON

Each step's tokens are random; requests never end, so that every step is a steady one. A step's time is that of `Scheduler.plan`,
`BatchPacker.pack` and `Scheduler.commit`, measured apart and summed; steps are planned one ahead, as in the engine's loop. Rows with
bursts plan four steps at once; their figures are those of one of them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import time
from collections import deque
from pathlib import Path

import numpy as np
from pagoda.hal.discovery import find
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.serving.engine.batch import BatchPacker
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.settings import SamplingSlots

PAGE = 16
VOCAB = 32_000
PARTS = ("plan", "pack", "commit")


class Load:
    """`requests` running requests of `prompt` tokens each or a few more, decoding."""

    def __init__(self, requests: int, pages: int, prompt: int, groups: int = 1, burst: int = 1) -> None:
        cache = LayerCache(CacheKind.FULL, 8, 128, 128, "bfloat16")
        group = CacheGroup(CacheKind.FULL, (0,), (cache,), PAGE, PAGE * cache.bytes_per_token)
        facts = RunnerFacts((group,) * groups, pages, 8192, VOCAB, "null", burst_steps=burst, burst_rows=requests)
        self.scheduler = Scheduler(SchedulerConfig(max_num_seqs=requests, max_num_batched_tokens=max(requests, 2048)), facts)
        self.settings = SamplingSlots(requests + 1, VOCAB)
        self.packer = BatchPacker(find("null").open(), (PAGE,) * groups, self.settings, 1 << 22, facts.overlap)
        self.random = np.random.default_rng(0)
        self.in_flight: deque[StepPlan] = deque()
        self.times: dict[str, list[float]] = {part: [] for part in PARTS}
        params = SamplingParams(temperature=1.0, max_tokens=None, ignore_eos=True, seed=1)
        for index in range(requests):  # lengths differ, so that pages do not all fill in the same step
            tokens = tuple(self.random.integers(0, VOCAB, prompt + index % PAGE).tolist())
            self.scheduler.submit(EngineRequest(f"request-{index}", tokens, params))
        while not self._steady(requests):
            self.turn()
        self.times = {part: [] for part in PARTS}

    def _steady(self, requests: int) -> bool:
        return bool(self.in_flight) and all(plan.num_rows == plan.num_tokens == requests for plan in self.in_flight)

    def turn(self) -> None:
        """One turn of the engine's loop with a step planned ahead."""
        while len(self.in_flight) < 2:
            began = time.perf_counter()
            plan = self.scheduler.plan()
            planned = time.perf_counter()
            if plan is None:
                break
            for admission in plan.admissions:
                self.settings.admit(admission)
            admitted = time.perf_counter()
            self.packer.pack(plan)
            self.times["plan"].append((planned - began) / plan.num_steps)
            self.times["pack"].append((time.perf_counter() - admitted) / plan.num_steps)
            self.in_flight.append(plan)
        plan = self.in_flight.popleft()
        count = int(plan.sampled.sum())
        tokens = self.random.integers(0, VOCAB, (count, plan.num_steps)).astype(np.int32)
        result = StepResult(plan.step, tokens, np.ones(count, np.int32) if plan.runs is None else plan.runs)
        began = time.perf_counter()
        self.scheduler.commit(plan, result)
        self.times["commit"].append((time.perf_counter() - began) / plan.num_steps)


def measure(requests: int, pages: int, prompt: int, steps: int, groups: int = 1, burst: int = 1) -> dict[str, float]:
    """Percentiles in µs of a step and of its parts."""
    load = Load(requests, pages, prompt, groups, burst)
    for _ in range(steps):
        load.turn()
    columns = {part: 1e6 * np.array(load.times[part][:steps]) for part in PARTS}
    columns["step"] = sum(columns.values(), np.zeros(steps))
    return {f"{part}_p{q}": round(float(np.percentile(column, q)), 1) for part, column in columns.items() for q in (50, 90, 99)}


def profile(requests: int, steps: int) -> None:
    load, profiler = Load(requests, 100_000, 256), cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        load.turn()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.profile:
        profile(256, options.steps)
        return
    rows = []
    for requests, pages, prompt, groups, burst in _grid():
        figures = measure(requests, pages, prompt, options.steps, groups, burst)
        rows.append({"requests": requests, "pages": pages, "prompt": prompt, "groups": groups, "burst": burst, **figures})
        parts = "  ".join(f"{part} {figures[f'{part}_p50']:7.1f}" for part in PARTS)
        load = f"{requests:5} requests  {pages:7} pages  {prompt:5} tokens  {groups} groups  bursts of {burst}"
        print(f"{load}:  step p50 {figures['step_p50']:7.1f} µs"
              f"  p99 {figures['step_p99']:7.1f}   ({parts})", flush=True)  # fmt: skip
    if options.json:
        machine = {"machine": platform.platform(), "python": platform.python_version(), "numpy": np.__version__}
        options.json.write_text(json.dumps({"command": "python benchmarks/host_step.py", **machine, "rows": rows}, indent=1) + "\n")


def _grid() -> list[tuple[int, int, int, int, int]]:
    counts = [(requests, 100_000, 32, 1, 1) for requests in (1, 8, 64, 256, 1024)]
    bursts = [(requests, 100_000, 32, 1, 4) for requests in (1, 8, 64)]
    pools = [(16, pages, 32, 1, 1) for pages in (1_000, 100_000)]
    return [*counts, *bursts, *pools, (256, 100_000, 1024, 1, 1), (256, 100_000, 256, 6, 1)]


if __name__ == "__main__":
    main()
