"""Share of allocated KV slots that hold nothing, under a mixed load: `python benchmarks/kv_waste.py [--mean 400] [--page 16]`.

Drives the real scheduler and block pool without a model. Prompts and outputs have random lengths; after every step the slots of pages in
use are compared with the tokens stored there. What the last, partly filled page of each request leaves empty should be all of it.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass

import numpy as np
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig

VOCAB = 32_000


@dataclass(frozen=True)
class Sample:
    """One step: slots of pages in use, tokens stored there, and what the last pages alone leave empty."""

    slots: int
    tokens: int
    last_pages: int


def measure(mean: int, page: int, running: int, requests: int, seed: int) -> list[Sample]:
    scheduler = _scheduler(page, running)
    draw = random.Random(seed)
    waiting, samples = requests, []
    while waiting or scheduler.has_work:
        while waiting and scheduler.stats().running + scheduler.stats().waiting < running:
            waiting -= 1
            scheduler.submit(_request(waiting, mean, draw))
        plan = scheduler.plan()
        assert plan is not None, "a scheduler with work and nothing in flight plans a step"
        stored = {slot: start + length for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True)}
        if len(stored) == scheduler.stats().running:
            samples.append(_sample(scheduler.stats().pages_used, page, stored))
        _answer(scheduler, plan, draw)
    return samples


def _scheduler(page: int, running: int) -> Scheduler:
    cache = LayerCache(CacheKind.FULL, 8, 128, 128, "bfloat16")
    group = CacheGroup(CacheKind.FULL, (0,), (cache,), page, page * cache.bytes_per_token)
    facts = RunnerFacts((group,), 200_000, 32_768, VOCAB, "null", overlap=1)
    # The prefix cache shares pages on purpose, so it is off: every slot in use belongs to one request.
    return Scheduler(SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=8192, enable_prefix_caching=False), facts)


def _request(number: int, mean: int, draw: random.Random) -> EngineRequest:
    prompt = tuple(draw.choices(range(VOCAB), k=max(1, int(draw.lognormvariate(0, 0.6) * mean * 0.6))))
    output = max(1, int(draw.expovariate(1 / (mean * 0.3))))
    return EngineRequest(f"request-{number}", prompt, SamplingParams(max_tokens=output, ignore_eos=True, seed=1))


def _sample(pages: int, page: int, stored: dict[int, int]) -> Sample:
    lengths = np.array(list(stored.values()))
    return Sample(pages * page, int(lengths.sum()), int((-lengths % page).sum()))


def _answer(scheduler: Scheduler, plan: StepPlan, draw: random.Random) -> None:
    count = int(plan.sampled.sum())
    tokens = np.array([[draw.randrange(VOCAB)] for _ in range(count)], np.int32).reshape(count, 1)
    scheduler.commit(plan, StepResult(plan.step, tokens, np.ones(count, np.int32)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mean", type=int, default=400, help="mean tokens of a request, prompt and output")
    parser.add_argument("--page", type=int, default=16, help="tokens per page")
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    samples = measure(options.mean, options.page, options.running, options.requests, options.seed)
    slots, tokens, last = (sum(getattr(sample, name) for sample in samples) for name in ("slots", "tokens", "last_pages"))
    result = {
        **vars(options),
        "steps": len(samples),
        "mean_tokens_held": round(tokens / sum(1 for _ in samples) / options.running, 1),
        "wasted_share": round(1 - tokens / slots, 4),
        "last_page_share": round(last / slots, 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
