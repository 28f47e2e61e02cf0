"""Ten thousand malformed inputs for real servers of tiny models, beside requests that must go on getting their right answers.

    python benchmarks/fuzz_server.py --inputs 10000 --output docs/perf/results/server-fuzz.json

Four servers, one for each kind of model; every endpoint; broken framing, JSON, fields, schemas, grammars, templates, media, forms, and
clients that hang up. Exits non-zero when an answer was a 5xx, came too late or was none, when a process ended, when the log has a
traceback, when a request or a page stayed behind, or when the requests beside them got anything but their right answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from hostile import Case, bases_of, cases, encoded
from hostile_http import form, frame, hang_up, send_frame
from tiny_servers import tiny_server, tone
from toy_process import ServerProcess

SHARES = {"generate": 0.7, "embed": 0.1, "score": 0.1, "hear": 0.1}
PATHS = {
    "generate": None,
    "embed": ("/v1/embeddings", "/pooling", "/v1/score", "/rerank", "/tokenize"),
    "score": ("/classify", "/pooling", "/score", "/v1/rerank", "/v2/rerank"),
    "hear": ("/v1/completions", "/v1/chat/completions", "/tokenize"),
}
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
PATIENCE = 30.0


@dataclass
class Fuzz:
    """One server's run. `faults`: what must not happen."""

    where: str
    http: httpx.AsyncClient
    rng: Random
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    async def send(self, case: Case) -> None:
        self.kinds[case.kind] += 1
        started = time.monotonic()
        try:
            answer = await self.http.post(case.path, content=case.body, headers={"Content-Type": case.media})
        except httpx.HTTPError as error:
            return self.fault(case, repr(error))
        self.slowest = max(self.slowest, (round(time.monotonic() - started, 2), f"{case.path} {case.body[:300]!r}"))
        self.counts[case.path][str(answer.status_code)] += 1
        text = answer.text
        if answer.status_code >= 500 or "internal_error" in text:
            self.fault(case, f"{answer.status_code} {text[-300:]}")
        elif answer.status_code >= 400 and not _says_why(text):
            self.fault(case, f"{answer.status_code} without a reason: {text[:300]}")

    async def wire(self, kind: str) -> None:
        """Below HTTP: a broken frame, or a client that hangs up."""
        self.kinds[kind] += 1
        at = urlsplit(self.where)
        host, port = str(at.hostname), int(at.port or 0)
        if kind == "framing":
            text = frame(self.rng)
            status = await send_frame(host, port, text)
            self.counts["framing"][status] += 1
            if status.startswith("5"):
                self.faults.append(f"framing: {status} for {text[:300]!r}")
        else:
            path = self.rng.choice(STREAMS)
            body = encoded({**self.rng.choice(bases_of(path)), "stream": self.rng.random() < 0.8, "background": None})
            self.counts[path][await hang_up(self.rng, host, port, path, body)] += 1

    def fault(self, case: Case, what: str) -> None:
        if len(self.faults) >= 200:
            return
        self.faults.append(f"{case.kind} {case.path}: {what}; body {case.body[:600]!r}{'…' if len(case.body) > 600 else ''}")


def _says_why(text: str) -> bool:
    try:
        return bool(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


async def drive(fuzz: Fuzz, kind: str, count: int, together: int) -> None:
    """Send `count` inputs, `together` at a time."""
    wire = ["framing"] * (count // 25) + (["left"] * (count // 12) if kind == "generate" else [])
    sounds = count // 2 if kind == "hear" else 0
    jobs: list[Any] = [*wire, *cases(fuzz.rng, count - len(wire) - sounds, PATHS[kind]), *(_spoken(fuzz.rng) for _ in range(sounds))]
    fuzz.rng.shuffle(jobs)

    async def worker() -> None:
        while jobs:
            job = jobs.pop()
            await (fuzz.wire(job) if isinstance(job, str) else fuzz.send(job))

    await asyncio.gather(*(worker() for _ in range(together)))


def _spoken(rng: Random) -> Case:
    body, media = form(rng, tone())
    return Case("form", rng.choice(("/v1/audio/transcriptions", "/v1/audio/translations")), body, media)


@asynccontextmanager
async def beside(http: httpx.AsyncClient, kind: str, faults: list[str]) -> AsyncIterator[Counter[str]]:
    """The same good request again and again; each answer must be the first one."""
    seen: Counter[str] = Counter()
    right = await _good(http, kind)

    async def ask() -> None:
        while True:
            try:
                got = await _good(http, kind)
            except httpx.HTTPError as error:
                got = repr(error)
            seen["right" if got == right else "wrong"] += 1
            if got != right and len(faults) < 100:
                faults.append(f"a good request beside got {got}, not {right}")
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _good(http: httpx.AsyncClient, kind: str) -> Any:
    if kind == "generate":
        body = {"prompt": [30, 40, 50], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = await http.post("/v1/completions", json=body)
        return answer.json().get("choices", answer.text) if answer.is_success else answer.text
    if kind == "hear":
        sent: Any = {"file": ("a.wav", tone()), "temperature": (None, "0")}
        return (await http.post("/v1/audio/transcriptions", files=sent)).text
    path, body = ("/v1/embeddings", {"input": "hello"}) if kind == "embed" else ("/score", {"text_1": "a", "text_2": "b"})
    answer = await http.post(path, json=body)
    # sums of a batch are in another order beside others: a few bits of a float
    return json.loads(answer.text, parse_float=lambda text: round(float(text), 4)).get("data", answer.text)


async def ended(http: httpx.AsyncClient, faults: list[str]) -> dict[str, Any]:
    """Whether the server is as before; what it still holds."""
    try:
        left = await left_over(http)
        if any(left.values()):
            faults.append(f"left over: {left}")
        if (health := await http.get("/health")).status_code != 200:
            faults.append(f"/health says {health.status_code}")
        return left
    except (httpx.HTTPError, ValueError, KeyError) as error:
        faults.append(f"the server does not answer any more: {error!r}")
        return {}


async def left_over(http: httpx.AsyncClient) -> dict[str, Any]:
    """What has not ended half a minute after the last input."""
    left: dict[str, Any] = {}
    for _ in range(300):
        stats = (await http.get("/stats")).json()
        left = {name: stats[name] for name in ("running", "waiting", "pages_used")}
        left["server_load"] = (await http.get("/load")).json()["server_load"]
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


async def run(server: ServerProcess, kind: str, count: int, together: int, seed: int) -> dict[str, Any]:
    """One server under its share of the inputs; the report."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=together + 1)
    async with httpx.AsyncClient(base_url=server.where, timeout=PATIENCE, limits=limits) as http:
        fuzz = Fuzz(server.where, http, Random(f"{seed} {kind}"))
        async with beside(http, kind, fuzz.faults) as good:
            await drive(fuzz, kind, count, together)
            await asyncio.sleep(0.2)
        left = await ended(http, fuzz.faults)
    logged = [line for line in server.errors if "Traceback" in line or "internal error" in line]
    if server.process.poll() is not None or logged:
        at = next((i for i, line in enumerate(server.errors) if "Traceback" in line), max(0, len(server.errors) - 40))
        fuzz.faults.insert(0, f"exit code {server.process.poll()}, {len(logged)} tracebacks: {''.join(server.errors[at : at + 60])}")
    return {
        "inputs": sum(fuzz.kinds.values()),
        "kinds": dict(sorted(fuzz.kinds.items())),
        "statuses": {path: dict(sorted(found.items())) for path, found in sorted(fuzz.counts.items())},
        "beside": dict(good),
        "left": left,
        "slowest_s": fuzz.slowest[0],
        "slowest": fuzz.slowest[1],
        "faults": fuzz.faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="of all servers together")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES, help="this kind of model alone, with all inputs")
    parser.add_argument("--output", type=Path, help="file for the report")
    options = parser.parse_args()
    shares = {options.only: 1.0} if options.only else SHARES
    reports = {}
    for kind, share in shares.items():
        with tempfile.TemporaryDirectory() as folder, tiny_server(Path(folder), kind) as server:
            reports[kind] = asyncio.run(run(server, kind, int(options.inputs * share), options.concurrency, options.seed))
    faults = sum(len(report["faults"]) for report in reports.values())
    command = f"python benchmarks/fuzz_server.py --inputs {options.inputs} --seed {options.seed}"
    found = {"date": time.strftime("%Y-%m-%d"), "command": command, "faults": faults, "servers": reports}
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1, ensure_ascii=True) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
