"""What a streamed token costs the front end: processor time of the API process a token, with an engine behind it that computes nothing.

    python benchmarks/front_end.py                                  # Pagoda's own, with the default model's tokenizer
    python benchmarks/front_end.py --url URL --pid PID --model NAME # any OpenAI-compatible server; PID: its API process
    python benchmarks/front_end.py --kind messages                  # streams of another kind: chat, stop, messages, responses

16, 256 and 1,024 clients stream completions at once. The engine is a process of its own, as in `pagoda serve`, and gives every request a
token a step: once at a pace that the front end can follow, an event a token (`--tokens-per-s`), and once as fast as it goes, where tokens
that wait for a slow client are sent together. Tokens a second and core are the inverse of the processor time, requests included.

At a pace, growth with the number of streams is told in three ways. `cpu_us_per_token`: all streams together have `--tokens`, so that with
1,024 of them each is short and carries a request's whole cost. `steady_us_per_event`: of an event by itself, from a second wave of as many
clients with streams of half the length; all that differs between both is events. `cpu_us_per_token_of_N`: each stream has N tokens
(`--stream-tokens`) whatever their number, few clients ask anew until as many tokens have come: the same mix of requests and events.
`us_per_request`: a stream of one token, as many clients at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pagoda.models.loading.reference import resolve
from pagoda.serving.api.address import bind
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.server import Addresses, Server, run_loop
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats, FinishReason, RequestDelta, SequenceDelta, StepDeltas
from pagoda.serving.engine.zmq_client import ZmqClient
from pagoda.serving.frontend.load import text_of

TEXT = "The quick brown fox jumps over the lazy dog, and a pagoda is a tower with many eaves. "
MODEL = "smollm2-135m-instruct"
CLIENTS = (16, 256, 1024)
UNPACED = "unpaced"


class Kind(NamedTuple):
    """A kind of streams: where they are asked for, how, by which field their length is told, and what ends them."""

    path: str
    body: dict[str, Any]
    length: str = "max_tokens"
    end: bytes = b"data: [DONE]"


ASKED = [{"role": "user", "content": TEXT}]
KINDS = {
    "completions": Kind("/v1/completions", {"prompt": [100] * 16, "ignore_eos": True}),
    "stop": Kind("/v1/completions", {"prompt": [100] * 16, "ignore_eos": True, "stop": ["no such words", "nor these"]}),
    "chat": Kind("/v1/chat/completions", {"messages": ASKED, "ignore_eos": True}),
    "messages": Kind("/v1/messages", {"messages": ASKED}, end=b'"type":"message_stop"'),
    "responses": Kind("/v1/responses", {"input": TEXT, "store": False}, "max_output_tokens", b'"type":"response.incomplete"'),
}


class NullCore:
    """What an engine's process needs of an `EngineCore`: every request gets the text's tokens, one a step of `pace` seconds."""

    def __init__(self, facts: EngineFacts, sink: Sink, ids: list[int], rate: float) -> None:
        """`rate`: tokens a second of all requests together."""
        self.facts, self._sink, self._ids, self._rate = facts, sink, ids, rate
        self._new: deque[EngineRequest] = deque()
        self._left: dict[str, int] = {}
        self._place = 0
        self._stopped = False

    def submit(self, request: EngineRequest) -> None:
        self._new.append(request)

    def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def call(self, method: str, arguments: dict[str, Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(EngineStats(running=len(self._left)) if method == "stats" else [])
        return done

    def health(self) -> None: ...

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        due = time.monotonic()
        while not self._stopped:
            rows = self._step()
            due = max(due + rows / self._rate, time.monotonic() - 0.05)
            time.sleep(max(0.0, due - time.monotonic()) if rows else 0.001)

    def _step(self) -> int:
        token = self._ids[self._place % len(self._ids)]
        self._place += 1
        deltas = StepDeltas()
        for request_id, left in list(self._left.items()):
            if left > 1:
                self._left[request_id] = left - 1
                deltas.request_ids.append(request_id)
                deltas.token_ids.append(token)
            elif self._left.pop(request_id, None):
                deltas.others.append(
                    RequestDelta(request_id, (SequenceDelta(0, (token,), finish_reason=FinishReason.LENGTH),), finished=True)
                )
        while self._new:
            request = self._new.popleft()
            if left := (request.params.max_tokens or 16) - 1:
                self._left[request.request_id] = left
            end = None if left else FinishReason.LENGTH
            deltas.others.append(RequestDelta(request.request_id, (SequenceDelta(0, (token,), finish_reason=end),), finished=not left))
        if len(deltas):
            self._sink.deltas(deltas)
        return len(deltas)


class NoExecutor:
    def stop(self) -> None: ...


def null_engine(ids: list[int], vocab: int, rate: float, sink: Sink) -> Engine:
    facts = EngineFacts(8192, num_pages=1 << 20, tokens_per_page=16, vocab_size=vocab, device="none")
    return Engine(NullCore(facts, sink, ids, rate), NoExecutor())  # type: ignore[arg-type]


def serve(rate: float) -> int:
    """The server's process: Pagoda's own text side and HTTP over the null engine."""
    starter = import_module("front_end").null_engine  # by a name that the engine's process finds, which `__main__` is not
    path = str(resolve(MODEL))
    text = text_of(EngineConfig(model=path))
    ids = text.tokenizer.encode(TEXT, add_special_tokens=False)
    config = ServerConfig(host="127.0.0.1", port=0, disable_access_log=True)

    async def main() -> int:
        client = await ZmqClient.start(partial(starter, ids, text.tokenizer.vocab_size, rate))
        service = Service(client, text, ModelCard(("null",), path), config)
        return await Server(service, Addresses(bind(config), None), stats=False).run()

    return run_loop(main)


def processor_seconds(pid: int) -> float:
    """That a process has used, to the nanosecond: Linux names its clock so. psutil counts by hundredths of a second."""
    return time.clock_gettime(~pid << 3 | 2)


class Seen(NamedTuple):
    """What waves of clients saw."""

    tokens: int
    events: int
    seconds: float
    cpu_seconds: float


@dataclass
class Stream(asyncio.Protocol):
    """One client: sends its request and counts events until the stream ends."""

    request: bytes
    done: asyncio.Future[int]
    end: bytes
    events: int = 0
    last: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        text = self.last + data
        self.events += text.count(b"data: {") - self.last.count(b"data: {")
        self.last = text[-40:]
        if self.end in text and not self.done.done():
            self.done.set_result(self.events)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"a stream ended early: {self.last!r}"))


async def wave(url: str, pid: int, model: str, clients: int, tokens: int, kind: str = "completions") -> Seen:
    """All clients at once, each with a stream of so many tokens."""
    at, asked = urlsplit(url), KINDS[kind]
    body = json.dumps({"model": model, **asked.body, asked.length: tokens, "stream": True, "temperature": 0}).encode()
    head = f"POST {asked.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    streams = [Stream(head.encode() + body, loop.create_future(), asked.end) for _ in range(clients)]
    before, started = processor_seconds(pid), time.perf_counter()
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, at.hostname, at.port)  # type: ignore[misc]
    events = await asyncio.gather(*(stream.done for stream in streams))
    seconds = time.perf_counter() - started
    await asyncio.sleep(0.02)  # the ends of its connections are the server's work too
    return Seen(clients * tokens, sum(events), seconds, processor_seconds(pid) - before)


def waves(count: int, *asked: Any) -> Seen:
    """So many one after the other, together."""
    seen = [asyncio.run(wave(*asked)) for _ in range(count)]
    return Seen(*(sum(column) for column in zip(*seen, strict=True)))  # type: ignore[arg-type]


def row(name: str, clients: int, seen: Seen) -> dict[str, Any]:
    micros = seen.cpu_seconds / seen.tokens * 1e6
    return {
        "engine": name,
        "clients": clients,
        "tokens_per_s": round(seen.tokens / seen.seconds),
        "cpu_us_per_token": round(micros, 2),
        "tokens_per_s_and_core": round(1e6 / micros) if micros else None,
        "events_per_token": round(seen.events / seen.tokens, 3),
    }


def steady(whole: Seen, half: Seen) -> float:
    """Microseconds an event, of two waves that differ in their streams' length."""
    return round((whole.cpu_seconds - half.cpu_seconds) / max(1, whole.events - half.events) * 1e6, 2)


def paced(options: argparse.Namespace, clients: int, whole: Seen, target: tuple[str, int, str]) -> dict[str, Any]:
    """What is told at a pace beside the row of `whole`."""
    half = waves(1, *target, clients, max(8, options.tokens // clients) // 2, options.kind)
    short = waves(max(1, 2048 // clients), *target, clients, 1, options.kind)
    told = {"steady_us_per_event": steady(whole, half), "us_per_request": round(short.cpu_seconds / short.tokens * 1e6, 1)}
    if each := options.stream_tokens:
        even = waves(max(1, options.tokens // (clients * each)), *target, clients, each, options.kind)
        told[f"cpu_us_per_token_of_{each}"] = round(even.cpu_seconds / even.tokens * 1e6, 2)
    return told


def measured(options: argparse.Namespace, url: str, pid: int, model: str, name: str) -> list[dict[str, Any]]:
    target = url, pid, model
    waves(1, *target, 8, 32, options.kind)
    rows = []
    for clients in options.clients:
        whole = waves(1, *target, clients, max(8, options.tokens // clients), options.kind)
        rows.append(row(name, clients, whole))
        if name != UNPACED:
            rows[-1] |= paced(options, clients, whole, target)
        print(rows[-1], flush=True)
    if name != UNPACED:
        print(growth(rows), flush=True)
    return rows


def growth(rows: list[dict[str, Any]]) -> str:
    """From the fewest clients to the most, each figure as many times as it was."""
    first, last = rows[0], rows[-1]
    told = (f"{key} {last[key] / max(first[key], 0.01):.2f}" for key in first if "_us_" in f"_{key}")
    return f"from {first['clients']} to {last['clients']} clients, times: {', '.join(told)}"


def own(options: argparse.Namespace, rate: float, name: str) -> list[dict[str, Any]]:
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(rate)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = next(line for line in process.stdout if " at http" in line)
        url = first.rpartition(" at ")[2].strip()
        return measured(options, url, process.pid, "null", name)
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--model", default="null")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--tokens", type=int, default=65_536, help="of all clients together in one wave")
    parser.add_argument(
        "--stream-tokens", type=int, default=128, help="of each stream, for the same mix with any number of clients; 0: not so"
    )
    parser.add_argument("--tokens-per-s", type=float, default=5000.0)
    parser.add_argument("--kind", choices=KINDS, default="completions")
    parser.add_argument("--output")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        return serve(options.serve)
    if options.url is not None:
        rows = measured(options, options.url, options.pid, options.model, "server")
    else:
        rows = own(options, options.tokens_per_s, "paced") + own(options, 1e9, UNPACED)
    if options.output is not None:
        with open(options.output, "w") as file:
            json.dump({"date": time.strftime("%Y-%m-%d"), "command": "python benchmarks/front_end.py", "rows": rows}, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
