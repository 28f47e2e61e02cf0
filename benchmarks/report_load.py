"""An engine under mixed load with requests that are left: pages, memory, and under `--batch-invariant` the answers themselves."""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import time
from typing import Any

import torch
from gpu_workloads import DummyEngine
from pagoda.serving.engine.mailbox import PATIENCE
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from report_shapes import LONGEST, SHAPES, engine

Prompt = tuple[int, ...]
SPICE: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_p": 0.9, "seed": 3},
    {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.7, "top_k": 20, "seed": 5},
    {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.4, "seed": 1},
)  # fmt: skip
MIB = 1 << 20


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Mixed requests, some of which are left: no page stays behind, memory does not grow."""
    with engine(options, max_num_batched_tokens=2048, kv_cache_memory_bytes=_pool(options)) as running:
        running.settle()
        began = time.perf_counter()
        found = running.run(_all(running, options))
        found["seconds_of_load"] = time.perf_counter() - began
    grown = [late - early for late, early in zip(found["memory"][-1], found["memory"][len(found["memory"]) // 2], strict=True)]
    found |= {"grown_bytes": grown, "ok": not found["pages_used"] and not found["wrong"] and grown[0] <= MIB and grown[1] <= 64 * MIB}
    shown = {name: value for name, value in found.items() if name != "memory"}
    print(shown, flush=True)
    return found


def _pool(options: argparse.Namespace) -> int:
    return {"tiny": 1 << 20, "0.6b": 4 << 30, "8b": 8 << 30}[options.shape]


def memory() -> tuple[int, int]:
    """Bytes that tensors hold, and that this process holds of the device (of the host where there is none)."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return int(torch.cuda.memory_allocated()), total - free
    return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def _all(running: DummyEngine, options: argparse.Namespace) -> dict[str, Any]:
    draw, wrong, left, points = random.Random(11), [], 0, []
    room = asyncio.Semaphore(300)
    prompts = _prompts(draw, options, options.requests)
    every = max(1, options.requests // 20)

    async def one(number: int) -> None:
        nonlocal left
        params = {"max_tokens": draw.choice((1, 4, 16, 48, 120)), **SPICE[number % len(SPICE)]}
        leave = draw.randint(0, 5) if number % 6 == 4 else None
        async with room:
            count = await _one(running, f"load-{number}", prompts[number], leave, params)
        left += leave is not None
        if leave is None and count != params["max_tokens"]:
            wrong.append(f"{number}: {count} tokens of {params['max_tokens']}")
        if number % every == 0:
            points.append(memory())

    await asyncio.gather(*map(one, range(options.requests)))
    used = -1
    for _ in range(100):
        if not (used := (await running.client.stats()).pages_used):
            break
        await asyncio.sleep(0.05)
    points.append(memory())
    stats = await running.client.stats()
    return {"requests": options.requests, "left": left, "wrong": wrong[:10], "pages_used": used, "preemptions": stats.preemptions,
            "prefix_hits": stats.prefix_hits, "memory": points}  # fmt: skip


async def _one(running: DummyEngine, name: str, prompt: Prompt, leave: int | None, params: dict[str, Any]) -> int:
    """Tokens that came; leaves after `leave` deltas."""
    request, count, deltas = EngineRequest(name, prompt, SamplingParams(ignore_eos=True, detokenize=False, **params)), 0, 0
    stream = running.client.generate(request, PATIENCE)
    try:
        async for delta in stream:
            count += sum(len(part.token_ids) for part in delta.sequences)
            deltas += 1
            if leave is not None and deltas > leave:
                break
    finally:
        await stream.aclose()
    return count


def _prompts(draw: random.Random, options: argparse.Namespace, count: int) -> list[Prompt]:
    """Short and long ones, a third of them with one of a few beginnings."""
    vocab, longest = SHAPES[options.shape]["vocab_size"], LONGEST[options.shape] // 2
    ids = range(10, vocab)
    beginnings = [tuple(draw.choices(ids, k=length)) for length in (64, longest // 3, longest // 2)]
    lengths = [min(length, longest // 2) for length in (1, 5, 30, 100, 300, longest)]
    return [(*(draw.choice(beginnings) if draw.random() < 0.3 else ()), *draw.choices(ids, k=draw.choice(lengths))) for _ in range(count)]


def invariance(options: argparse.Namespace) -> dict[str, Any]:
    """Under `--batch-invariant` 64 answers are those of each request alone, logprobs to the bit, and what it costs."""
    draw = random.Random(3)
    prompts = _prompts(draw, options, 64)
    settings = [{"max_tokens": draw.choice((8, 24, 40)), **SPICE[number % 3], "logprobs": 2} for number in range(len(prompts))]
    company = _prompts(draw, options, 200)
    with engine(options, batch_invariant=True, max_num_batched_tokens=1024, kv_cache_memory_bytes=_pool(options)) as running:
        began = time.perf_counter()
        alone = [running.run(_answer(running, f"alone-{n}", p, s)) for n, (p, s) in enumerate(zip(prompts, settings, strict=True))]
        middle = time.perf_counter()
        crowded = running.run(_crowd(running, prompts, settings, company))
        seconds = [middle - began, time.perf_counter() - middle]
        kernels = running.facts.kernels
    differ = [number for number, (a, b) in enumerate(zip(alone, crowded, strict=True)) if a != b]
    turned = [number for number in differ if alone[number][0] != crowded[number][0]]
    print(f"{len(differ)} of {len(prompts)} differ, {len(turned)} in tokens; {seconds} s; {kernels}", flush=True)
    return {"ok": not differ, "differ": differ, "turned": turned, "of": len(prompts), "seconds_of_load": seconds, "kernels": kernels}


async def _crowd(running: DummyEngine, prompts: list[Prompt], settings: list[dict[str, Any]], company: list[Prompt]) -> list[Any]:
    draw = random.Random(4)

    async def later(number: int) -> Any:
        await asyncio.sleep(draw.random() * 0.5)
        return await _answer(running, f"crowd-{number}", prompts[number], settings[number])

    others = [_one(running, f"other-{n}", p, draw.choice((None, 2)), {"max_tokens": 30, **SPICE[n % 6]}) for n, p in enumerate(company)]
    answers = await asyncio.gather(*map(later, range(len(prompts))), *others)
    return list(answers[: len(prompts)])


async def _answer(running: DummyEngine, name: str, prompt: Prompt, settings: dict[str, Any]) -> tuple[list[int], list[float]]:
    request = EngineRequest(name, prompt, SamplingParams(ignore_eos=True, detokenize=False, **settings))
    parts = [part async for delta in running.client.generate(request, PATIENCE) for part in delta.sequences]
    entries = [entry for part in parts for entry in part.logprobs or ()]
    return [token for part in parts for token in part.token_ids], [x for entry in entries for x in (entry.logprob, *entry.top_logprobs)]
