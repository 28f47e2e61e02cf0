"""Soak whole servers: 64 clients, every endpoint in random order, clients that leave, malformed requests, slow readers.

    python benchmarks/soak_server.py --minutes 30 --output docs/perf/results/soak-server.json

Five servers of tiny models take part: one generates (gRPC too), one embeds, one scores, one sees, one hears. First the time to the first
token of the generating one is taken while it is alone, idle and with requests arriving at half the rate that it can do. Exits non-zero
when an answer was wrong or lost, when a request or a page stayed behind, when memory (PSS of all processes) was not flat, when a traceback
stands in a log, or when at half of its capacity the p99 of the time to the first token was above `--ttft-ratio` times that of an idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx
import psutil
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

import first_tokens
from soak_actions import ACTIONS, Client
from tiny_servers import adapter, tiny_server
from toy_process import ServerProcess

MIB = 1 << 20
KINDS = ("generate", "embed", "score", "see", "hear")


@dataclass
class Memory:
    """PSS over time of all processes of each server, in MiB."""

    servers: dict[str, ServerProcess]
    points: dict[str, list[float]] = field(default_factory=dict)

    async def watch(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            for kind, server in self.servers.items():
                self.points.setdefault(kind, []).append(round(pss(server.process.pid) / MIB, 1))

    @property
    def growth(self) -> dict[str, float]:
        """What the slope after the first two fifths comes to over the rest of the run, as a share, by server."""
        return {kind: _grown(points) for kind, points in self.points.items()}


def _grown(points: list[float]) -> float:
    rest = points[2 * len(points) // 5 :]
    if len(rest) < 2:
        return 0.0
    slope, start = statistics.linear_regression(range(len(rest)), rest)
    return round(slope * (len(rest) - 1) / start, 4)


def pss(pid: int) -> int:
    """Of a process and its children, in bytes."""
    root, total = psutil.Process(pid), 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


async def work(client: Client, until: float) -> None:
    names, weights = list(ACTIONS), [weight for weight, _ in ACTIONS.values()]
    while time.monotonic() < until:
        name = client.rng.choices(names, weights)[0]
        client.seen[name] += 1
        try:
            await ACTIONS[name][1](client)
        except (httpx.HTTPError, grpc.RpcError, ValueError, KeyError, IndexError, OSError) as error:
            client.faults.append(f"{name}: {error!r}"[:600])


async def left_over(http: httpx.AsyncClient) -> dict[str, Any]:
    left: dict[str, Any] = {}
    for _ in range(600):
        stats = (await http.get("/stats")).json()
        left = {name: stats[name] for name in ("running", "waiting", "pages_used")} | (await http.get("/load")).json()
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


async def soak(servers: dict[str, ServerProcess], adapters: Path, ttft: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The whole run; its report."""
    seen: Counter[str] = Counter()
    faults: list[str] = []
    memory = Memory(servers)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    http = {kind: httpx.AsyncClient(base_url=server.where, timeout=120, limits=limits) for kind, server in servers.items()}
    channel = grpc.aio.insecure_channel(servers["generate"].grpc)
    stub = InferenceStub(channel)
    clients = [Client(http, stub, Random(f"{options.seed} {k}"), adapters, k, seen, faults) for k in range(options.clients)]
    watch = asyncio.create_task(memory.watch(options.minutes * 60 / 60))
    await asyncio.gather(*(work(client, time.monotonic() + options.minutes * 60) for client in clients))
    left = {kind: await left_over(one) for kind, one in http.items()}
    watch.cancel()
    await channel.close()
    await asyncio.gather(watch, *(one.aclose() for one in http.values()), return_exceptions=True)
    return report(seen, faults, left, memory, ttft, servers, options)


def report(
    seen: Counter[str],
    faults: list[str],
    left: dict[str, Any],
    memory: Memory,
    ttft: dict[str, Any],
    servers: dict[str, ServerProcess],
    options: argparse.Namespace,
) -> dict[str, Any]:
    faults += [f"{kind}: left over {found}" for kind, found in left.items() if any(found.values())]
    faults += [f"{kind}: memory grew by {share:.1%} after its warm-up" for kind, share in memory.growth.items() if share > options.growth]
    if ttft["ratio"] > options.ttft_ratio:
        faults.append(f"at half capacity the p99 to the first token is {ttft['ratio']} times that of an idle server")
    for kind, server in servers.items():
        if server.process.poll() is not None or any("Traceback" in line for line in server.errors):
            faults.append(f"{kind}: exit code {server.process.poll()}: {''.join(server.errors[-40:])}")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/soak_server.py --minutes {options.minutes:g} --seed {options.seed}",
        "clients": options.clients,
        "minutes": options.minutes,
        "requests": dict(sorted(seen.items())),
        "total": sum(seen.values()),
        "left": left,
        "pss_mib": memory.points,
        "growth": memory.growth,
        "first_token": ttft,
        "faults": faults[:50],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--growth", type=float, default=0.02, help="share that memory may grow by after two fifths of the time")
    parser.add_argument("--ttft-ratio", type=float, default=2.0)
    parser.add_argument("--idle-seconds", type=float, default=15, help="of each part of the first measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads would only take the clients' processors
    with ExitStack() as stack:
        folders = {kind: Path(stack.enter_context(tempfile.TemporaryDirectory())) for kind in KINDS}
        flags = {"generate": ("--grpc-port", "0")}
        servers: dict[str, ServerProcess] = {}
        for kind, folder in folders.items():
            servers[kind] = stack.enter_context(tiny_server(folder, kind, *flags.get(kind, ())))
            if kind == "generate":  # alone on the machine
                ttft = asyncio.run(first_tokens.measure(servers[kind].where, options.idle_seconds))
        found = asyncio.run(soak(servers, adapter(folders["generate"]), ttft, options))
    text = json.dumps(found, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
