"""Many requests at once in this process: what letting one in takes, how soon steps begin, and how long a device waits for its host.

    python benchmarks/admission.py                 512 prompts of 512 tokens against a device of 350,000 tokens a second
    python benchmarks/admission.py --host          the scheduler alone, no thread beside it: µs of a request in submit and in its first plan
    python benchmarks/admission.py --host --profile

The engine runs on the null device, which computes nothing; its answers come as late as those of a device with a rate (`--rate`) and a
shortest step (`--shortest`) would, one step after the other. Idle is what that device waits between the first step's begin and the end
of the last one with prompts.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import platform
import pstats
import random
import statistics
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from gpu_workloads import DummyEngine
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.serving.engine import build
from pagoda.serving.engine.executors.inprocess import InProcessExecutor
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from report_shapes import SHAPES

VOCAB, PAGE, BUDGET, SLOTS = SHAPES["0.6b"]["vocab_size"], 64, 8192, 256


class Ran(NamedTuple):
    """A step: when it was there, began and ended, and its tokens."""

    ready: float
    began: float
    ended: float
    tokens: int
    rows: int


class Device:
    """Answers of the null device, as late as they would be."""

    def __init__(self, rate: float, shortest: float) -> None:
        self.rate, self.shortest, self.ran = rate, shortest, list[Ran]()
        self._steps: SimpleQueue[tuple[StepPlan, Future[StepResult], Future[StepResult]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, plan: StepPlan, real: Future[StepResult]) -> Future[StepResult]:
        late: Future[StepResult] = Future()
        self._steps.put((plan, real, late))
        return late

    def _work(self) -> None:
        ended = 0.0
        while True:
            plan, real, late = self._steps.get()
            result = real.result()
            ready = time.perf_counter()
            began = max(ready, ended)
            ended = began + max(self.shortest * plan.num_steps, plan.num_tokens / self.rate)
            time.sleep(max(0.0, ended - time.perf_counter()))
            self.ran.append(Ran(ready, began, ended, plan.num_tokens, plan.num_rows))
            late.set_result(result)


class Late(InProcessExecutor):
    """The executor of an engine whose ranks are `device`."""

    device: Device

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self.device.submit(plan, super().submit(plan))


def figures(began: float, ran: list[Ran]) -> dict[str, float]:
    """Of one round, which began then."""
    last = max(place for place, step in enumerate(ran) if step.tokens > step.rows)
    gaps = [max(0.0, after.began - before.ended) for before, after in itertools.pairwise(ran[: last + 1])]
    return {
        "first_step_ms": 1e3 * (ran[0].began - began),
        "first_step_tokens": ran[0].tokens,
        "prompts_ms": 1e3 * (ran[last].ended - began),
        "idle_ms": 1e3 * sum(gaps),
        "largest_gap_ms": 1e3 * max(gaps, default=0.0),
        "steps": last + 1,
    }


def through_the_engine(options: argparse.Namespace) -> list[dict[str, float]]:
    """All requests of a round handed to a running engine at once."""
    Late.device = Device(options.rate, options.shortest)
    build.InProcessExecutor = Late  # type: ignore[misc]
    config = SHAPES["tiny"] | {"vocab_size": VOCAB}
    settings: dict[str, Any] = {"max_num_seqs": SLOTS, "max_num_batched_tokens": BUDGET, "max_model_len": 2048}
    rounds = list[dict[str, float]]()
    with DummyEngine(config, device="null:h200", use_tqdm_on_load=False, **settings) as engine:
        for number in range(options.rounds + 1):
            prompts = [list(request.prompt) for request in _requests(options, number)]
            Late.device.ran.clear()
            began = time.perf_counter()
            engine.generate(prompts, options.output)
            if number:  # the first one meets sizes for the first time
                rounds.append(figures(began, list(Late.device.ran)))
    return rounds


def by_the_host(options: argparse.Namespace) -> list[dict[str, float]]:
    """µs of a request: in `Scheduler.submit`, and in the plans that let it in, which take one step at a time."""
    cache = LayerCache(CacheKind.FULL, 8, 128, 128, "bfloat16")
    facts = RunnerFacts((CacheGroup(CacheKind.FULL, (0,), (cache,), PAGE, PAGE * cache.bytes_per_token),), 100_000, 2048, VOCAB, "null")
    profiler, rounds = cProfile.Profile(), list[dict[str, float]]()
    for number in range(options.rounds + 1):
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=options.requests, max_num_batched_tokens=BUDGET), facts)
        requests = _requests(options, number)
        gc.collect()
        if options.profile and number:
            profiler.enable()
        began = time.perf_counter()
        for request in requests:
            scheduler.submit(request)
        submitted, planning = time.perf_counter(), 0.0
        while scheduler.awaits_first_tokens():
            before = time.perf_counter()
            plan = scheduler.plan()
            planning += time.perf_counter() - before
            assert plan is not None
            rows = int(plan.sampled.sum())
            scheduler.commit(plan, StepResult(plan.step, np.full((rows, 1), 11, np.int32), np.ones(rows, np.int32)))
        profiler.disable()
        rounds.append({"submit_us": 1e6 * (submitted - began) / len(requests), "plan_us": 1e6 * planning / len(requests)})
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return rounds[1:]


def _requests(options: argparse.Namespace, number: int) -> list[EngineRequest]:
    draw = random.Random(number)
    params = SamplingParams(temperature=1.0, max_tokens=options.output, ignore_eos=True, detokenize=False)
    return [
        EngineRequest(f"{number}-{one}", tuple(draw.choices(range(10, VOCAB), k=options.prompt)), params) for one in range(options.requests)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--rate", type=float, default=350_000, help="tokens a second")
    parser.add_argument("--shortest", type=float, default=0.001, help="seconds of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--profile", action="store_true", help="of --host")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = by_the_host(options) if options.host else through_the_engine(options)
    for one in rounds:
        print({name: round(value, 1) for name, value in one.items()})
    median = {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}
    print("median", median)
    if options.json:
        machine = {"machine": platform.platform(), "python": platform.python_version()}
        told = {name: value for name, value in vars(options).items() if name not in ("json", "profile")}
        record = {"command": "python benchmarks/admission.py", **machine, **told, "median": median, "rounds": rounds}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
