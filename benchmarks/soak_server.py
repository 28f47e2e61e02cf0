"""Soak whole servers: 64 clients, every endpoint in random order, clients that leave, malformed requests, slow readers.

    python benchmarks/soak_server.py --minutes 30 --output docs/perf/results/soak-server.json

First the default model's server stands alone on the machine: its time to the first token, idle and with requests arriving at half the
rate that it can do, of lengths as in people's conversations (`first_tokens.py` measures short ones too). Then five servers are soaked
together: the default model's generates (gRPC too), those of tiny models embed, score, see and hear. Before that, what is bounded and made
at first need (libraries of grammars, grammars, readers of media) is asked for, so that it does not come late and look like growth
(`soak_fill.py`; `filled` of the report says how many requests that took, and each server's MiB before and after). Every half a minute a
line says how far it is. `holds` of the report says of each demand whether it was met, and the exit code is 0 where all were: no page
leaked, no request stuck (left in a server, or without an answer for `--patience` seconds), memory flat (what the processes of each server
keep after the first two fifths, by PSS), at half capacity a p99 to the first token within `--ttft-ratio` of the idle one, and nothing else
wrong: no answer wrong or lost, no server ended, no traceback in a log.
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
from lora_folders import make_adapter
from soak_actions import ACTIONS, Client
from soak_fill import fill
from tiny_servers import COMMON, TEMPLATE, adapter, tiny_server
from toy_process import SERVE, ServerProcess

MIB = 1 << 20
KINDS = ("generate", "embed", "score", "see", "hear")
POINTS = 60
"""Of memory, over a run."""
FEW = 4
"""Points of which the least tells what is kept."""
QUERIES = {f"model.layers.{layer}.self_attn.q_proj": (576, 576) for layer in range(30)}
"""What an adapter of the default model changes."""


@dataclass
class Memory:
    """PSS over time of all processes of each server, in MiB."""

    servers: dict[str, ServerProcess]
    points: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Of each process, the server's own first."""

    async def watch(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            for kind, server in self.servers.items():
                found = pss(server.process.pid)
                self.points.setdefault(kind, []).append(round(sum(found.values()) / MIB, 1))
                for pid, of_process in found.items():
                    self.parts.setdefault(kind, {}).setdefault(pid, []).append(round(of_process / MIB, 1))

    def report(self, minutes: float) -> dict[str, dict[str, Any]]:
        """By server, what its processes keep after the first two fifths: how much more by the end, as a share and an hour's."""
        found = {}
        for kind, points in self.points.items():
            settled = 2 * len(points) // 5
            # A process that begins later (a compiler of grammars, when it is first asked for) is not ready at its first point.
            rests = [each[settled if len(each) == len(points) else 1 :] for each in self.parts[kind].values()]
            risen = sum(rise(rest) for rest in rests)
            hourly = round(risen / (minutes * (len(points) - settled) / len(points)) * 60, 2)
            growth = round(risen / statistics.median(points[settled:]), 4)
            found[kind] = {"mib_per_hour": hourly, "growth": growth, "mib": points, "processes": list(self.parts[kind].values())}
        return found


def rise(points: list[float]) -> float:
    """By how much what is kept rises from the first of `points` to the last, by a line through the least of every few: what a request
    takes and gives back comes on top of it, at times half as much again."""
    least = [min(points[k : k + FEW]) for k in range(0, len(points) - FEW + 1, FEW)]
    return statistics.linear_regression(range(len(least)), least).slope * (len(least) - 1) if len(least) > 1 else 0.0


def pss(pid: int) -> dict[int, int]:
    """Of a process and its children, in bytes by process."""
    root, found = psutil.Process(pid), dict[int, int]()
    for process in [root, *root.children(recursive=True)]:
        try:
            found[process.pid] = process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass
class Waits:
    """How long actions took, and those that were given up."""

    patience: float
    longest: dict[str, float] = field(default_factory=dict)
    stuck: list[str] = field(default_factory=list)

    async def run(self, client: Client, name: str) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.patience):
                await ACTIONS[name][1](client)
        except TimeoutError:
            self.stuck.append(name)
        self.longest[name] = max(self.longest.get(name, 0.0), round(time.monotonic() - began, 2))


async def work(client: Client, until: float, waits: Waits) -> None:
    names, weights = list(ACTIONS), [weight for weight, _ in ACTIONS.values()]
    while time.monotonic() < until:
        name = client.rng.choices(names, weights)[0]
        client.seen[name] += 1
        try:
            await waits.run(client, name)
        except (httpx.HTTPError, grpc.RpcError, ValueError, KeyError, IndexError, OSError) as error:
            client.faults.append(f"{name}: {error!r}"[:600])


async def tell(seen: Counter[str], faults: list[str], waits: Waits, memory: Memory) -> None:
    """How far it is, every half a minute, and what went wrong meanwhile."""
    began, told = time.monotonic(), 0
    while True:
        await asyncio.sleep(30)
        points = " ".join(f"{kind} {found[-1]:.0f}" for kind, found in memory.points.items())
        done = f"{seen.total()} requests, {len(faults)} faults, {len(waits.stuck)} stuck; MiB: {points}"
        print(f"{(time.monotonic() - began) / 60:.1f} min: {done}", *faults[told:], sep="\n  ", file=sys.stderr, flush=True)
        told = len(faults)


async def left_over(http: httpx.AsyncClient) -> dict[str, Any]:
    """Requests and pages that are still there a minute after the last client has gone."""
    left: dict[str, Any] = {}
    for _ in range(600):
        stats = (await http.get("/stats")).json()
        left = {name: stats[name] for name in ("running", "waiting", "pages_used")} | (await http.get("/load")).json()
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


async def filled(servers: dict[str, ServerProcess], http: dict[str, httpx.AsyncClient], faults: list[str]) -> dict[str, dict[str, Any]]:
    """Fill one server after the other; of each the requests, the seconds, and the MiB before and after."""
    found = {}
    for kind, server in servers.items():
        began, before = time.monotonic(), sum(pss(server.process.pid).values())
        requests = await fill(http[kind], kind, faults)
        mib = [round(nbytes / MIB, 1) for nbytes in (before, sum(pss(server.process.pid).values()))]
        found[kind] = {"requests": requests, "seconds": round(time.monotonic() - began, 1), "mib": mib}
        print(f"filled {kind}: {found[kind]}", file=sys.stderr, flush=True)
    return found


async def soak(servers: dict[str, ServerProcess], adapters: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The whole run; its report."""
    seen: Counter[str] = Counter()
    faults: list[str] = []
    memory, waits = Memory(servers), Waits(options.patience)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    http = {kind: httpx.AsyncClient(base_url=server.where, timeout=options.patience, limits=limits) for kind, server in servers.items()}
    made = await filled(servers, http, faults)
    channel = grpc.aio.insecure_channel(servers["generate"].grpc)
    stub = InferenceStub(channel)
    rngs = [Random(f"{options.seed} {k}") for k in range(options.clients)]
    clients = [Client(http, stub, rng, adapters, k, seen, faults, exact=options.tiny) for k, rng in enumerate(rngs)]
    watch = asyncio.gather(memory.watch(options.minutes * 60 / POINTS), tell(seen, faults, waits, memory))
    await asyncio.gather(*(work(client, time.monotonic() + options.minutes * 60, waits) for client in clients))
    watch.cancel()
    left = {kind: await left_over(one) for kind, one in http.items()}
    await channel.close()
    await asyncio.gather(watch, *(one.aclose() for one in http.values()), return_exceptions=True)
    faults += [f"{kind}: {what}" for kind, server in servers.items() if (what := _ended_or_traced(server))]
    return {
        "requests": dict(sorted(seen.items())),
        "total": sum(seen.values()),
        "leaked_pages": sum(found["pages_used"] for found in left.values()),
        "stuck_requests": len(waits.stuck) + sum(found["running"] + found["waiting"] for found in left.values()),
        "stuck": dict(Counter(waits.stuck)),
        "left": left,
        "longest_s": dict(sorted(waits.longest.items())),
        "filled": made,
        "memory": memory.report(options.minutes),
        "faults": len(faults),
        "first_faults": faults[:50],
    }


def _ended_or_traced(server: ServerProcess) -> str | None:
    if server.process.poll() is None and not any("Traceback" in line for line in server.errors):
        return None
    return f"exit code {server.process.poll()}: {''.join(server.errors[-40:])}"


def holds(found: dict[str, Any], options: argparse.Namespace) -> dict[str, bool]:
    """Each demand, and whether it was met."""
    return {
        "no leaked page": not found["leaked_pages"],
        "no stuck request": not found["stuck_requests"] and not any(left["server_load"] for left in found["left"].values()),
        "flat memory": all(server["growth"] <= options.growth for server in found["memory"].values()),
        "first token at half capacity": found["first_token"]["ratio"] <= options.ttft_ratio,
        "nothing else wrong": not found["faults"],
    }


def default_server(*flags: str) -> ServerProcess:
    """The default model, with what the clients ask of the one that generates."""
    pool = ("--kv-cache-memory-bytes", "256M", "--max-model-len", "512")
    templates = ("--chat-template", str(TEMPLATE), "--trust-request-chat-template")
    common = (flag for flag in COMMON if flag not in ("--dtype", "float32"))
    return ServerProcess(
        [*SERVE, *common, "--served-model-name", "tiny", "small", *pool, *templates, "--enable-lora", *flags], patience=300
    )


def started(stack: ExitStack, options: argparse.Namespace) -> tuple[dict[str, ServerProcess], Path]:
    """A server of each kind, and an adapter for the one that generates."""
    folders = {kind: Path(stack.enter_context(tempfile.TemporaryDirectory())) for kind in KINDS}
    servers = {} if options.tiny else {"generate": stack.enter_context(default_server("--grpc-port", "0"))}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: more threads would only take the others' processors
    for kind in KINDS[len(servers) :]:
        flags = ("--grpc-port", "0") if kind == "generate" else ()
        servers[kind] = stack.enter_context(tiny_server(folders[kind], kind, *flags))
    where = folders["generate"]
    return servers, adapter(where) if options.tiny else make_adapter(where / "adapter", QUERIES, seed=1)


def first_token(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, first_tokens.server_of(Path(folder), options.tiny) as server:
        return asyncio.run(first_tokens.measure(server.where, options.first_token_seconds, "short" if options.tiny else "conversations"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--growth", type=float, default=0.02, help="share that memory may grow by after two fifths of the time")
    parser.add_argument("--ttft-ratio", type=float, default=2.0)
    parser.add_argument(
        "--first-token-seconds", type=float, default=100, help="of the idle part and the full one; the half one takes three times as long"
    )
    parser.add_argument("--tiny", action="store_true", help="let a tiny model generate")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a request counts as stuck")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    print("the time to the first token …", file=sys.stderr, flush=True)
    ttft = first_token(options)
    print(f"the p99 is {ttft['ratio']} times the idle one; the soak …", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        servers, made = started(stack, options)
        found = asyncio.run(soak(servers, made, options))
    found = {"first_token": ttft, **found}
    command = f"python benchmarks/soak_server.py --minutes {options.minutes:g} --clients {options.clients} --seed {options.seed}"
    command += " --tiny" * options.tiny
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), "command": command, "holds": holds(found, options), **found}, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return 0 if all(holds(found, options).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
