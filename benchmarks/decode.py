"""Milliseconds a decode step and output tokens a second at given numbers of requests, in this process: `python benchmarks/decode.py`.

Each request has a random prompt and a fixed number of new tokens, greedy, end of sequence ignored. A step's time is the time of a run less
that of the same run with one new token, over the other tokens. `--busy N` does the same beside N processes that only burn processor time.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from pagoda import LLM, SamplingParams


def _burn() -> None:
    while True:
        pass


def _run(llm: LLM, prompts: list[list[int]], tokens: int, sampling: dict[str, Any]) -> float:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def measure(llm: LLM, rows: int, options: argparse.Namespace) -> dict[str, float]:
    draw = random.Random(rows)
    sampling: dict[str, Any] = {"temperature": options.temperature, "seed": 1 if options.temperature else None}
    steps, rates = [], []
    for turn in range(options.rounds + 1):
        prompts = [draw.choices(range(100, 40_000), k=options.prompt) for _ in range(rows)]
        first = _run(llm, prompts, 1, sampling)
        whole = _run(llm, prompts, options.tokens, sampling)
        if turn:  # the first one records steps
            steps.append((whole - first) / (options.tokens - 1) * 1e3)
            rates.append(rows * options.tokens / whole)
    return {
        "rows": rows,
        "ms_step": round(statistics.median(steps), 3),
        "best": round(min(steps), 3),
        "tok_s": round(statistics.median(rates), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=0, help="processes that burn processor time meanwhile")
    options = parser.parse_args()
    with ExitStack() as stack:
        llm = stack.enter_context(
            LLM(
                options.model,
                dtype=options.dtype,
                max_num_seqs=max(options.rows),
                enable_prefix_caching=False,
                kv_cache_memory_bytes=1 << 30,
            )
        )
        for _ in range(options.busy):
            process = multiprocessing.get_context("spawn").Process(target=_burn, daemon=True)
            process.start()
            stack.callback(process.kill)
        results = [measure(llm, rows, options) for rows in options.rows]
    print(json.dumps({
        "model": options.model, "dtype": options.dtype, "busy": options.busy, "temperature": options.temperature, "results": results,
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.processor() or platform.machine(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
