"""Soak whole servers: 64 clients, every endpoint in random order, clients that leave, malformed requests, slow readers.

    python benchmarks/soak_server.py --minutes 30 --output docs/perf/results/soak-server.json

Three servers of tiny models (one generates, one embeds, one hears) take part. Exits non-zero when an answer was wrong or lost, when a
request or a page stayed behind, when memory (PSS of all processes) was not flat, when a traceback stands in a log, or when at half of
its capacity the p99 of the first server's time to the first token was above `--ttft-ratio` times that of an idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from pagoda.serving.cli.bench.load import LoadOptions
from pagoda.serving.cli.bench.serve import ServeOptions, measure
from pagoda.serving.cli.remote import lines_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from hostile import bases_of, cases, encoded
from hostile_http import frame, hang_up, send_frame
from tiny_servers import adapter, tiny_server, tone
from toy_process import ServerProcess

MIB, VOCAB = 1 << 20, 490
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
CHAT = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
SOUND = tone()


@dataclass
class Client:
    """One client's way of asking; `http`: by kind of server. Every action raises or notes a fault when its answer is not right."""

    http: dict[str, httpx.AsyncClient]
    rng: Random
    adapters: Path
    number: int
    seen: Counter[str]
    faults: list[str]

    async def post(self, kind: str, path: str, **body: Any) -> Any:
        answer = await self.http[kind].post(path, json=body)
        if answer.status_code != 200:
            raise ValueError(f"{path}: {answer.status_code} {answer.text[:200]}")
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def expect(self, right: bool, what: Any) -> None:
        if not right:
            raise ValueError(f"wrong: {str(what)[:300]}")

    def prompt(self) -> list[int]:
        start = self.rng.choice((10, 20))  # some begin alike, so that cached pages are shared and evicted
        length = self.rng.randint(1, 150)
        return [start + k for k in range(length // 2)] + [self.rng.randrange(10, VOCAB) for _ in range(length - length // 2)]

    async def completion(self) -> None:
        count, n = self.rng.randint(1, 40), self.rng.choice((1, 1, 3))
        body = {
            "prompt": self.prompt(),
            "max_tokens": count,
            "n": n,
            "ignore_eos": True,
            "temperature": self.rng.choice((0, 1)),
            "logprobs": self.rng.choice((None, 2)),
        }
        reply = await self.post("generate", "/v1/completions", **body)
        self.expect(reply["usage"]["completion_tokens"] == count * n, reply)

    async def same_seed(self) -> None:
        body = {"prompt": self.prompt(), "max_tokens": 12, "ignore_eos": True, "seed": self.rng.randrange(1000)}
        reply = await self.post("generate", "/v1/completions", **body)
        text = "".join([event["choices"][0]["text"] for event in await self.events("/v1/completions", body) if event["choices"]])
        self.expect(text == reply["choices"][0]["text"], (text, reply))

    async def chat(self) -> None:
        count = self.rng.randint(1, 30)
        events = await self.events(
            "/v1/chat/completions", {"messages": CHAT, "max_tokens": count, "ignore_eos": True, "stream_options": {"include_usage": True}}
        )
        self.expect(events[-1]["usage"]["completion_tokens"] == count, events[-1])

    async def structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        reply = await self.post(
            "generate", "/v1/chat/completions", messages=CHAT, max_tokens=40, response_format=form, include_reasoning=False
        )
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop":
            self.expect(json.loads(choice["message"]["content"])["a"] in (1, 2, 3), reply)

    async def response(self) -> None:
        reply = await self.post("generate", "/v1/responses", input="hello", max_output_tokens=8, background=self.rng.random() < 0.3)
        one = f"/v1/responses/{reply['id']}"
        for _ in range(600):
            if (found := (await self.http["generate"].get(one)).json())["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.05)
        self.expect(found["status"] in ("completed", "incomplete"), found)
        if self.rng.random() < 0.5:
            self.expect((await self.http["generate"].delete(one)).json()["deleted"], one)

    async def message(self) -> None:
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 8}
        counted = await self.post("generate", "/v1/messages/count_tokens", model="tiny", messages=CHAT)
        reply = await self.post("generate", "/v1/messages", **body)
        self.expect(reply["usage"]["input_tokens"] + reply["usage"]["cache_read_input_tokens"] == counted["input_tokens"], (reply, counted))

    async def ids(self) -> None:
        [made] = await self.post("generate", "/v1/completions/render", prompt="hello", max_tokens=6, temperature=0, ignore_eos=True)
        reply = await self.post("generate", "/inference/v1/generate", **made)
        self.expect(len(reply["choices"][0]["token_ids"]) == 6, reply)

    async def tokens(self) -> None:
        text = "The quick brown fox " * self.rng.randint(1, 200)
        found = await self.post("generate", "/tokenize", prompt=text)
        self.expect((await self.post("generate", "/detokenize", tokens=found["tokens"]))["prompt"] == text, found["count"])

    async def lora(self) -> None:
        name = f"a{self.number}"
        await self.post("generate", "/v1/load_lora_adapter", lora_name=name, lora_path=str(self.adapters))
        reply = await self.post("generate", "/v1/completions", model=name, prompt="hi", max_tokens=3, ignore_eos=True)
        await self.post("generate", "/v1/unload_lora_adapter", lora_name=name)
        self.expect(reply["model"] == name, reply)

    async def vectors(self) -> None:
        texts = ["hello"] * self.rng.randint(1, 8)
        reply = await self.post("embed", "/v1/embeddings", input=texts)
        self.expect(len(reply["data"]) == len(texts), reply)
        await self.post("embed", "/pooling", input="hello", task="token_embed")

    async def scores(self) -> None:
        reply = await self.post("embed", "/rerank", query="a", documents=["b", "a", "cc"])
        self.expect(len(reply["results"]) == 3, reply)
        await self.post("embed", "/v1/score", text_1="a", text_2=["b", "c"])

    async def speech(self) -> None:
        sent: Any = {
            "file": ("a.wav", SOUND),
            "temperature": (None, "0"),
            "response_format": (None, self.rng.choice(("json", "verbose_json", "srt"))),
        }
        answer = await self.http["hear"].post("/v1/audio/transcriptions", files=sent)
        self.expect(answer.status_code == 200, answer.text)

    async def look(self) -> None:
        path = self.rng.choice(("/health", "/metrics", "/stats", "/load", "/v1/models", "/version", "/server_info", "/", "/tokenizer_info"))
        answer = await self.http[self.rng.choice(list(self.http))].get(path)
        self.expect(answer.status_code == 200, (path, answer.status_code))

    async def left(self) -> None:
        path = self.rng.choice(STREAMS)
        body = {**bases_of(path)[0], "stream": True, "max_tokens": 200, "ignore_eos": True}
        at = urlsplit(str(self.http["generate"].base_url))
        await hang_up(self.rng, str(at.hostname), int(at.port or 0), path, encoded(body))

    async def malformed(self) -> None:
        _, case = cases(self.rng, 2)
        if case.kind == "template":
            return
        kind = self.rng.choice(list(self.http))
        answer = await self.http[kind].post(case.path, content=case.body, headers={"Content-Type": case.media})
        self.expect(answer.status_code < 500, (case, answer.text))
        at = urlsplit(str(self.http[kind].base_url))
        status = await send_frame(str(at.hostname), int(at.port or 0), frame(self.rng))
        self.expect(not status.startswith("5"), status)

    async def slow(self) -> None:
        body = {"prompt": self.prompt(), "max_tokens": 300, "ignore_eos": True, "stream": True, "logprobs": 5}
        async with self.http["generate"].stream("POST", "/v1/completions", json=body) as answer:
            lines = []
            async for line in lines_of(answer):
                lines += [line] if line else []
                await asyncio.sleep(0.01)
        self.expect(len(lines) > 1 and lines[-1] == b"data: [DONE]" and b'"length"' in lines[-2], lines[-2:])

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        async with self.http["generate"].stream("POST", path, json={**body, "stream": True}) as answer:
            lines = [line async for line in lines_of(answer) if line]
        self.expect(lines[-1:] == [b"data: [DONE]"], lines[-1:])
        return [json.loads(line[6:]) for line in lines[:-1]]


ACTIONS: dict[str, tuple[int, Callable[[Client], Awaitable[None]]]] = {
    "completion": (16, Client.completion),
    "same_seed": (6, Client.same_seed),
    "chat": (12, Client.chat),
    "structured": (4, Client.structured),
    "response": (6, Client.response),
    "message": (6, Client.message),
    "ids": (4, Client.ids),
    "tokens": (4, Client.tokens),
    "lora": (2, Client.lora),
    "vectors": (6, Client.vectors),
    "scores": (6, Client.scores),
    "speech": (4, Client.speech),
    "look": (4, Client.look),
    "left": (10, Client.left),
    "malformed": (6, Client.malformed),
    "slow": (4, Client.slow),
}


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
        """Last fifth against the middle one, as a share, by server."""
        return {kind: _grown(points) for kind, points in self.points.items()}


def _grown(points: list[float]) -> float:
    fifth = max(1, len(points) // 5)
    middle, last = points[2 * fifth : 3 * fifth], points[-fifth:]
    return round(statistics.median(last) / statistics.median(middle) - 1, 4) if middle and last else 0.0


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
        except (httpx.HTTPError, ValueError, KeyError, IndexError, OSError) as error:
            client.faults.append(f"{name}: {error!r}"[:600])


async def first_tokens(url: str) -> dict[str, float]:
    """p99 of the time to the first token in ms, idle and at half of the requests a second that it can do, and those."""
    load = {"input_len": 64, "output_len": 32, "vocab": VOCAB, "range_ratio": 0.5}
    idle = await measure(ServeOptions(url=url, max_concurrency=1), LoadOptions(num_prompts=60, **load))
    full = await measure(ServeOptions(url=url, max_concurrency=64), LoadOptions(num_prompts=300, **load))
    rate = full["requests_per_s"]
    half = await measure(ServeOptions(url=url, request_rate=rate / 2), LoadOptions(num_prompts=int(max(100, rate * 10)), **load))
    p99 = {name: round(found["ttft_ms"]["p99"], 2) for name, found in (("idle", idle), ("half", half))}
    return {
        "requests_per_s": round(rate, 2),
        "ttft_p99_ms_idle": p99["idle"],
        "ttft_p99_ms_half": p99["half"],
        "ratio": round(p99["half"] / p99["idle"], 2),
    }


async def left_over(http: httpx.AsyncClient) -> dict[str, Any]:
    left: dict[str, Any] = {}
    for _ in range(600):
        stats = (await http.get("/stats")).json()
        left = {name: stats[name] for name in ("running", "waiting", "pages_used")} | (await http.get("/load")).json()
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


async def soak(servers: dict[str, ServerProcess], adapters: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The whole run; its report."""
    seen: Counter[str] = Counter()
    faults: list[str] = []
    memory = Memory(servers)
    ttft = await first_tokens(servers["generate"].where)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    http = {kind: httpx.AsyncClient(base_url=server.where, timeout=120, limits=limits) for kind, server in servers.items()}
    clients = [Client(http, Random(f"{options.seed} {k}"), adapters, k, seen, faults) for k in range(options.clients)]
    watch = asyncio.create_task(memory.watch(options.minutes * 60 / 60))
    await asyncio.gather(*(work(client, time.monotonic() + options.minutes * 60) for client in clients))
    left = {kind: await left_over(one) for kind, one in http.items()}
    watch.cancel()
    await asyncio.gather(watch, *(one.aclose() for one in http.values()), return_exceptions=True)
    return report(seen, faults, left, memory, ttft, servers, options)


def report(
    seen: Counter[str],
    faults: list[str],
    left: dict[str, Any],
    memory: Memory,
    ttft: dict[str, float],
    servers: dict[str, ServerProcess],
    options: argparse.Namespace,
) -> dict[str, Any]:
    faults += [f"{kind}: left over {found}" for kind, found in left.items() if any(found.values())]
    faults += [
        f"{kind}: memory grew by {share:.1%} from the middle to the end" for kind, share in memory.growth.items() if share > options.growth
    ]
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
    parser.add_argument("--growth", type=float, default=0.02, help="share that memory may grow by from the middle to the end")
    parser.add_argument("--ttft-ratio", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        folders = {kind: Path(stack.enter_context(tempfile.TemporaryDirectory())) for kind in ("generate", "embed", "hear")}
        servers = {kind: stack.enter_context(tiny_server(folder, kind)) for kind, folder in folders.items()}
        found = asyncio.run(soak(servers, adapter(folders["generate"]), options))
    text = json.dumps(found, indent=1) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
