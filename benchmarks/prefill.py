"""Prompt tokens a second on the CPU, in this process, and where a prompt's time goes by primitive.

    python benchmarks/prefill.py                            the default model, prompts of 1,024 and 4,096 tokens
    python benchmarks/prefill.py MODEL --dtype bfloat16     another model
    python benchmarks/prefill.py --profile                  also a run with every primitive timed, with GFLOP/s of the products

A figure is the median time from submitting a random prompt to its one output token; no prefix is reused.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pagoda import LLM, SamplingParams
from pagoda.hal.kernel import KernelRun
from pagoda.hal.table import Choice
from pagoda.serving.engine import target
from pagoda.serving.engine.config import EngineConfig


class Timed:
    """A kernel that adds its time to `book[kernel, shape]`, and the operations of products."""

    def __init__(self, book: dict[str, list[float]], choice: Choice, run: KernelRun) -> None:
        self._book, self._choice, self._inner = book, choice, run
        self.pack, self.plan = run.pack, run.plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self._inner.run(*args, **kwargs)
        seconds = time.perf_counter() - start
        facts, name = self._choice.facts, f"{self._choice.op}={self._choice.chosen.name}"
        flops = 0.0
        if self._choice.op in ("gemm", "gemm_gguf"):
            name += f" {args[1].shape[0]}×{facts.in_features}×{facts.out_features}"  # type: ignore[attr-defined]
            flops = 2.0 * args[1].shape[0] * facts.in_features * facts.out_features  # type: ignore[attr-defined]
        if self._choice.op == "paged_attention":
            tokens = args[0].shape[0]
            flops = 2.0 * tokens * (tokens + 1) * facts.num_heads * facts.head_dim  # type: ignore[attr-defined]
        entry = self._book[name]
        for index, value in enumerate((1, seconds, flops)):
            entry[index] += value
        return result


@contextmanager
def timed_kernels(book: dict[str, list[float]] | None) -> Iterator[None]:
    """Engines that start within have their kernels timed into `book`."""
    plain = target.kernel_table
    if book is not None:
        target.kernel_table = lambda backend, info, policy, wrap: plain(backend, info, policy, partial(Timed, book))
    try:
        yield
    finally:
        target.kernel_table = plain


def seconds_of(llm: LLM, tokens: int, seed: int) -> float:
    prompt = random.Random(seed).choices(range(100, 40_000), k=tokens)
    start = time.perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False)
    return time.perf_counter() - start


def show(book: dict[str, list[float]], total: float) -> None:
    for name, (calls, seconds, flops) in sorted(book.items(), key=lambda item: -item[1][1]):
        if seconds > 0.002 * total:
            rate = f"{flops / seconds / 1e9:7.1f} GFLOP/s" if flops else ""
            print(f"  {name:48} {int(calls):5} calls {seconds * 1e3:8.1f} ms {100 * seconds / total:5.1f} % {rate}")
    rest = total - sum(seconds for _, seconds, _ in book.values())
    print(f"  {'everything else':48}             {rest * 1e3:8.1f} ms {100 * rest / total:5.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=EngineConfig().model)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    settings: dict[str, Any] = {"dtype": options.dtype, "enable_prefix_caching": False, "kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 4}
    settings |= {"max_num_batched_tokens": max(options.tokens), "max_model_len": max(options.tokens) + 1, "device": "cpu"}
    book: dict[str, list[float]] | None = defaultdict(lambda: [0.0, 0.0, 0.0]) if options.profile else None
    with timed_kernels(book), LLM(options.model, **settings) as llm:
        for tokens in options.tokens:
            seconds_of(llm, tokens, 0)
            if book is not None:
                book.clear()
                total = seconds_of(llm, tokens, 1)
                show(book, total)
            times = [seconds_of(llm, tokens, 2 + turn) for turn in range(options.rounds)]
            figures = {"tok_s": round(tokens / statistics.median(times), 1), "best_tok_s": round(tokens / min(times), 1)}
            facts = {
                "model": options.model,
                "dtype": options.dtype,
                "tokens": tokens,
                "threads": torch.get_num_threads(),
                "profiled": options.profile,
            }
            print(json.dumps(facts | figures), flush=True)


if __name__ == "__main__":
    main()
