"""The time to the first token of a server: idle, and with requests that arrive at half the rate that it can do.

    python benchmarks/first_tokens.py --output FILE          # the default model, with the machine's threads
    python benchmarks/first_tokens.py --lengths conversations --seconds 100 --output FILE   # lengths as in ShareGPT's conversations
    python benchmarks/first_tokens.py --tiny --output FILE   # a random one of two layers: what is not its steps

Clients write and read sockets as plainly as they can, since they share the machine with the server: what they took would count as the
server's. Arrivals are Poisson's. Exits non-zero when the p99 at half capacity is above `--ratio` times the idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from pagoda.serving.cli.bench.load import conversation_lengths
from pagoda.serving.engine.turns import take_short_turns
from tiny_servers import tiny_server
from toy_process import SERVE, SMALL_POOL, ServerProcess

PROMPT, ANSWER, VOCAB = 64, 32, 490
AT_ONCE = 64


def short_lengths(random: Random) -> tuple[int, int]:
    """Of a prompt, half to one and a half times 64 tokens, and of its answer, as many times 32."""
    prompt, answer = (random.randint(mean // 2, mean * 3 // 2) for mean in (PROMPT, ANSWER))
    return prompt, answer


LENGTHS: dict[str, Callable[[Random], tuple[int, int]]] = {"short": short_lengths, "conversations": conversation_lengths}


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own, and when its first event came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.began = time.perf_counter()
        self.first = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._tail = self._tail[-20:] + data
        if not self.first and b"data: {" in self._tail:
            self.first = time.perf_counter()
        if b"data: [DONE]" in self._tail:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            whole = self.first and b"data: [DONE]" in self._tail
            self.ended.set_result(None) if whole else self.ended.set_exception(ValueError(f"a stream ended early: {self._tail[:200]!r}"))


class Load:
    """Random prompts."""

    def __init__(self, url: str, lengths: Callable[[Random], tuple[int, int]], seed: int = 0) -> None:
        self._at, self._lengths, self._rng = urlsplit(url), lengths, Random(seed)

    async def ask(self, longest: int | None = None) -> float:
        """Seconds to the first token; of an answer of at most so many tokens."""
        length, answer = self._lengths(self._rng)
        answer = min(answer, longest or answer)
        prompt = [self._rng.randrange(10, VOCAB) for _ in range(length)]
        body = json.dumps({"prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(head.encode() + body), self._at.hostname, self._at.port)
        async with asyncio.timeout(300):
            await stream.ended
        return stream.first - stream.began

    async def alone(self, count: int) -> list[float]:
        """One request after the other, of a token each: how long an answer is makes no difference to its first one."""
        return [await self.ask(1) for _ in range(count)]

    async def full(self, seconds: float) -> float:
        """Requests a second with many at once, each followed by a next one, for so long and for three times as many at least; counted
        from when half of the first ones have ended until the last one begins."""
        ends, began = [], time.perf_counter()

        async def client() -> None:
            while time.perf_counter() - began < seconds or len(ends) < 3 * AT_ONCE:
                await self.ask()
                ends.append(time.perf_counter() - began)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))
        first, last = ends[AT_ONCE // 2], max(seconds, ends[3 * AT_ONCE - 1])
        return sum(first < end <= last for end in ends) / (last - first)

    async def arriving(self, rate: float, seconds: float) -> list[float]:
        """So many a second, whatever becomes of those before."""
        tasks, due, started = [], 0.0, time.perf_counter()
        while due < seconds:
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(self.ask()))
            due += self._rng.expovariate(rate)
        return list(await asyncio.gather(*tasks))


def percentile(times: Sequence[float], share: float) -> float:
    """In ms."""
    return round(1000 * sorted(times)[min(len(times) - 1, int(share * len(times)))], 2)


async def measure(url: str, seconds: float, lengths: str = "short") -> dict[str, Any]:
    """Idle for so long, then what it can do, and three times as long at half of that."""
    take_short_turns()  # or a client would wait for the server's threads, as none on another machine does
    load = Load(url, LENGTHS[lengths])
    await load.alone(20)
    await asyncio.gather(*(load.ask() for _ in range(AT_ONCE)))
    idle: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        idle += await load.alone(10)
    capacity = await load.full(seconds)
    half = await load.arriving(capacity / 2, 3 * seconds)
    found = {"idle": idle, "half": half}
    return {
        "lengths": lengths,
        "requests_per_s": round(capacity, 2),
        "requests": {name: len(times) for name, times in found.items()},
        "ttft_p90_ms": {name: percentile(times, 0.9) for name, times in found.items()},
        "ttft_p50_ms": {name: percentile(times, 0.5) for name, times in found.items()},
        "ttft_p99_ms": {name: percentile(times, 0.99) for name, times in found.items()},
        "ratio": round(percentile(half, 0.99) / percentile(idle, 0.99), 2),
    }


def server_of(folder: Path, tiny: bool) -> ServerProcess:
    """The default model's, or a tiny one's."""
    if not tiny:
        return ServerProcess([*SERVE, *SMALL_POOL, "--kv-cache-memory-bytes", "2G", "--disable-access-log"], patience=120)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads would only take the clients' processors
    return tiny_server(folder, "generate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=15, help="of the idle part and the full one; the half one takes three times as long"
    )
    parser.add_argument("--lengths", choices=list(LENGTHS), default="short", help="of prompts and answers")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ratio", type=float, default=2.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server_of(Path(folder), options.tiny) as server:
        found = asyncio.run(measure(server.where, options.seconds, options.lengths))
    command = f"python benchmarks/first_tokens.py{' --tiny' * options.tiny} --lengths {options.lengths} --seconds {options.seconds:g}"
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), "command": command, **found}, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return 1 if found["ratio"] > options.ratio else 0


if __name__ == "__main__":
    sys.exit(main())
