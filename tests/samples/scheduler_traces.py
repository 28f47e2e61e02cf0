"""Fixed random traces through the scheduler. `python tests/samples/scheduler_traces.py` writes what they plan to step_plans.json;
do that, and say why, when a change is meant to change plans."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from pagoda.hal.kv import CacheKind
from pagoda.serving.engine.trace import digest_plan
from scheduler_toy import Toy, group, toy_facts

GOLDEN = Path(__file__).with_name("step_plans.json")

TRACES = {
    "plain": ({"num_pages": 60, "overlap": 2}, {"max_num_seqs": 6, "max_num_batched_tokens": 24}),
    "no overlap": ({"num_pages": 60, "overlap": 1}, {"max_num_seqs": 6, "max_num_batched_tokens": 24}),
    "few pages": ({"num_pages": 22, "overlap": 2}, {"max_num_seqs": 6, "max_num_batched_tokens": 16, "scheduling_policy": "priority"}),
    "chunks": ({"num_pages": 60, "overlap": 3}, {"max_num_seqs": 8, "max_num_batched_tokens": 7, "long_prefill_token_threshold": 4}),
    "windows": (
        {"num_pages": 70, "overlap": 2, "groups": (group(4), group(4, CacheKind.SLIDING, 8, (1,)), group(2, CacheKind.CHUNKED, 6, (2,)))},
        {"max_num_seqs": 4, "max_num_batched_tokens": 16},
    ),
}


def run_trace(name: str) -> list[str]:
    """What this trace plans, a line of JSON per step."""
    facts, config = TRACES[name]
    toy, random = Toy(toy_facts(**facts), **config), np.random.default_rng(7)
    for number in range(40):
        _submit(toy, random, number)
        for _ in range(int(random.integers(0, 6))):
            toy.step()
        if random.random() < 0.1:
            toy.hear(toy.scheduler.abort([f"r{number}"]))
    toy.drain()
    return [json.dumps(digest_plan(plan)) for plan in toy.plans]


def _submit(toy: Toy, random: np.random.Generator, number: int) -> None:
    kind = random.choice(["plain", "plain", "plain", "samples", "bound", "beams"])
    shared = range(5 * int(random.integers(0, 3)), 5 * int(random.integers(3, 5)))
    prompt = [*shared, *random.integers(0, 50, int(random.integers(1, 6))).tolist()]
    params = {"max_tokens": int(random.integers(1, 9)), "ignore_eos": bool(random.integers(0, 2)), "seed": number}
    request = {"priority": int(random.integers(0, 3))}
    if kind == "samples":
        params |= {"n": 3, "temperature": 1.0}
    elif kind == "bound":
        params |= {"bad_words_token_ids": ((48, 49),)}
    elif kind == "beams":
        request |= {"beam_width": 2}
    toy.submit(f"r{number}", prompt, request=request, **params)


def main() -> None:
    traces = {name: run_trace(name) for name in TRACES}
    lines = [f'"{name}": [\n' + ",\n".join(steps) + "\n]" for name, steps in traces.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
