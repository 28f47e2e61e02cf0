"""Soak a running server: random lengths, streams, clients that leave, bad requests; then nothing may be left over.

    python benchmarks/soak.py --url http://127.0.0.1:8000 --pid PID --requests 1000

Prints a JSON report and exits non-zero when a reply was lost or wrong, a page or request stayed behind, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from pagoda.serving.cli.remote import lines_of

MIB = 1 << 20


@dataclass
class Soak:
    """One run's settings and what it saw."""

    http: httpx.AsyncClient
    rng: random.Random
    vocab: int
    longest_prompt: int
    longest_answer: int
    seen: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    done: int = 0

    def body(self) -> dict[str, Any]:
        length = self.rng.randint(1, self.longest_prompt)
        start = self.rng.randint(0, 3)  # some prompts begin alike, so that cached pages are shared and evicted
        ids = [(start + 7 * k) % self.vocab for k in range(length // 2)]
        ids += [self.rng.randrange(self.vocab) for _ in range(length - len(ids))]
        tokens = self.rng.randint(1, self.longest_answer)
        n = self.rng.choice((1, 1, 1, 2))
        return {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": self.rng.choice((0, 1)), "n": n}

    def fault(self, text: str) -> None:
        self.faults.append(text)

    async def whole(self, body: dict[str, Any]) -> None:
        reply = (await self.http.post("/v1/completions", json=body)).json()
        asked = body["max_tokens"] * body["n"]
        if reply.get("usage", {}).get("completion_tokens") != asked:
            self.fault(f"asked for {asked} tokens, got {json.dumps(reply)[:300]}")

    async def streamed(self, body: dict[str, Any]) -> None:
        fields = {"stream": True, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", "/v1/completions", json={**body, **fields}) as response:
            lines = [line.decode() async for line in lines_of(response) if line]
        if lines[-1] != "data: [DONE]":
            return self.fault(f"a stream ended with {lines[-1]!r:.300}")
        asked, last = body["max_tokens"] * body["n"], json.loads(lines[-2].removeprefix("data: "))
        if (last.get("usage") or {}).get("completion_tokens") != asked:
            self.fault(f"asked for {asked} tokens, the stream said {lines[-2]!r:.300}")

    async def left(self, body: dict[str, Any]) -> None:
        stay = self.rng.randint(0, 5)
        async with self.http.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": self.longest_answer, "stream": True}
        ) as response:
            count = 0
            async for _ in lines_of(response):
                if (count := count + 1) > stay:
                    break

    async def cancelled(self, body: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self.http.post("/v1/completions", json={**body, "max_tokens": self.longest_answer}))
        await asyncio.sleep(self.rng.random() * 0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def bad(self, body: dict[str, Any]) -> None:
        wrong = self.rng.choice(({"prompt": [self.vocab + 5]}, {"max_tokens": -1}, {"n": 0}, {"max_tokens": 10**6}, {"prompt": []}))
        response = await self.http.post("/v1/completions", json={**body, **wrong})
        if response.status_code != 400 or "error" not in response.json():
            self.fault(f"a bad request got {response.status_code}: {response.text[:300]}")

    async def one(self) -> None:
        kinds: dict[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
            "whole": self.whole, "streamed": self.streamed, "left": self.left, "cancelled": self.cancelled, "bad": self.bad
        }  # fmt: skip
        name = self.rng.choices(list(kinds), (4, 4, 2, 1, 1))[0]
        self.seen[name] += 1
        try:
            await kinds[name](self.body())
        except (httpx.HTTPError, ValueError, IndexError) as error:
            self.fault(f"{name}: {error!r}")
        self.done += 1


async def drained(http: httpx.AsyncClient, patience: float = 10.0) -> dict[str, Any]:
    """The server's numbers when nothing runs any more, or when patience ends."""
    stats: dict[str, Any] = {}
    for _ in range(int(patience / 0.1)):
        stats = (await http.get("/stats")).json()
        if not (stats["running"] or stats["waiting"] or stats["pages_used"]):
            break
        await asyncio.sleep(0.1)
    return stats


def memory_of(pid: int) -> int:
    """Bytes that the process and its children alone use."""
    root = psutil.Process(pid)
    return sum(process.memory_full_info().uss for process in [root, *root.children(recursive=True)])


def slope(points: list[tuple[int, int]]) -> float:
    """Bytes a request over the second half, by least squares; the first half warms caches up."""
    late = points[len(points) // 2 :]
    if len(late) < 2:
        return 0.0
    mean_x, mean_y = (sum(p[k] for p in late) / len(late) for k in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in late)
    return sum((x - mean_x) * (y - mean_y) for x, y in late) / spread if spread else 0.0


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run all requests, `concurrency` at a time; the report."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.concurrency)
    async with httpx.AsyncClient(base_url=options.url, timeout=300, limits=limits) as http:
        engine = (await http.get("/server_info")).json()["engine"]
        run = Soak(http, random.Random(options.seed), engine["vocab_size"], options.longest_prompt, options.longest_answer)
        every = max(1, options.requests // 40)

        async def worker() -> None:
            while sum(run.seen.values()) < options.requests:
                await run.one()
                if options.pid and run.done % every == 0:
                    run.memory.append((run.done, memory_of(options.pid)))

        await asyncio.gather(*(worker() for _ in range(options.concurrency)))
        stats = await drained(http)
        load = (await http.get("/load")).json()["server_load"]
    return report(run, stats, load, options.growth)


def report(run: Soak, stats: dict[str, Any], load: int, growth: float) -> dict[str, Any]:
    left = {name: stats[name] for name in ("running", "waiting", "pages_used")} | {"server_load": load}
    if any(left.values()):
        run.fault(f"left over at the end: {left}")
    grew = slope(run.memory)
    if grew > growth:
        run.fault(f"memory grew by {grew:.0f} bytes a request; {growth:.0f} are allowed")
    mib = [round(size / MIB, 1) for _, size in run.memory]
    return {"requests": dict(run.seen), "left": left, "bytes_per_request": round(grew), "memory_mib": mib, "faults": run.faults[:20]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--longest-answer", type=int, default=40)
    parser.add_argument("--growth", type=float, default=20_000, help="bytes a request that memory may grow in the second half")
    parser.add_argument("--seed", type=int, default=0)
    found = asyncio.run(soak(parser.parse_args()))
    print(json.dumps(found, indent=2))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
