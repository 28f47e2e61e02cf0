"""Ten times the load that a server can carry: what it refuses, and how much of its work it still gets done.

    python benchmarks/overload.py --output docs/perf/results/overload.json

A tiny model's server with a bounded queue. First its capacity: as many clients as it runs at once, each with a next request as soon as one
ends. Then requests at `--times` that rate, whatever becomes of them. Exits non-zero unless everything is answered with 200 or with 429 and
`Retry-After`, and the rate of finished requests is at least 90 % of the capacity. Answers are long, so that it is the engine that is
overloaded, not the processor time of the clients that share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from tiny_servers import tiny_server

ROWS, QUEUE, ANSWER = 16, 16, 440
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    """One request at a time, written and read with as little work as possible: the clients share the machine with the server."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: asyncio.Future[bytes] | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, _, body = self._data.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if length is not None and len(body) >= int(length[1]):
            self._end(self._data)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._end(b"")

    def _end(self, answer: bytes) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    async def ask(self, request: bytes) -> bytes:
        """The whole answer; nothing when the connection was lost."""
        self._data, self._answer = b"", asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(120):
            return await self._answer


class Clients:
    """Keeps connections for further requests."""

    def __init__(self, url: str, seed: int) -> None:
        self._at, self._rng = urlsplit(url), Random(seed)
        self._idle: list[Connection] = []

    async def ask(self) -> str:
        """The status of one whole request, `429 bare` where it says no time to come again, or what went wrong."""
        body = json.dumps(
            {"prompt": [self._rng.randrange(10, 490) for _ in range(16)], "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
        ).encode()
        try:
            connection = await self._connection()
            answer = await connection.ask(HEAD % len(body) + body)
        except (OSError, TimeoutError) as error:
            return repr(error)
        if connection.open:
            self._idle.append(connection)
        return _status(answer)

    async def _connection(self) -> Connection:
        while self._idle:
            if (kept := self._idle.pop()).open:
                return kept
        _, made = await asyncio.get_running_loop().create_connection(Connection, self._at.hostname, self._at.port)
        return made


def _status(answer: bytes) -> str:
    status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "none"
    if status == "200":
        tokens = json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"]
        return status if tokens == ANSWER else f"200 with {tokens} tokens"
    return "429 bare" if status == "429" and b"retry-after: " not in answer.lower() else status


async def capacity(url: str, seconds: float) -> float:
    """Requests a second with the server full and nobody waiting long."""
    clients, done, end = Clients(url, 0), 0, time.monotonic() + seconds

    async def client() -> None:
        nonlocal done
        while time.monotonic() < end:
            status = await clients.ask()
            assert status in ("200", "429"), status
            done += status == "200" and time.monotonic() < end
            await asyncio.sleep(0.02 if status == "429" else 0)  # all came at once in the beginning

    await asyncio.gather(*(client() for _ in range(ROWS + QUEUE // 2)))
    return done / seconds


async def overload(url: str, rate: float, seconds: float) -> tuple[Counter[str], int]:
    """Statuses of all, and how many requests finished within the time."""
    clients, seen, tasks, finished = Clients(url, 1), Counter[str](), [], 0
    started = time.monotonic()

    async def one() -> None:
        nonlocal finished
        status = await clients.ask()
        seen[status] += 1
        finished += status == "200" and time.monotonic() < started + seconds

    sent = 0
    while (now := time.monotonic() - started) < seconds:
        while sent < now * rate:
            tasks.append(asyncio.create_task(one()))
            sent += 1
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    return seen, finished


async def measure(url: str, options: argparse.Namespace) -> dict[str, object]:
    await capacity(url, 2)
    before = await capacity(url, options.seconds)
    seen, finished = await overload(url, options.times * before, options.seconds)
    after = await capacity(url, options.seconds)
    able = (before + after) / 2
    share = finished / options.seconds / able
    odd = {status: count for status, count in seen.items() if status not in ("200", "429")}
    faults = [f"answers: {odd}"] if odd else []
    faults += [] if seen["429"] else ["nothing was refused"]
    faults += [f"only {share:.0%} of the capacity was finished"] if share < 0.9 else []
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/overload.py --seconds {options.seconds:g} --times {options.times:g}",
        "capacity_per_s": [round(before, 2), round(after, 2)],
        "sent_per_s": round(options.times * before, 2),
        "finished_per_s": round(finished / options.seconds, 2),
        "share_of_capacity": round(share, 3),
        "statuses": dict(seen),
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15, help="of each of the three parts")
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads would only take the clients' processors
    flags = ("--max-num-seqs", str(ROWS), "--max-num-queued-reqs", str(QUEUE))
    with tempfile.TemporaryDirectory() as folder, tiny_server(Path(folder), "generate", *flags) as server:
        found = asyncio.run(measure(server.where, options))
    text = json.dumps(found, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
