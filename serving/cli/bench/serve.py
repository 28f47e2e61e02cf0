"""`pagoda bench serve`: a running server under load, seen as its clients see it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pagoda import __version__
from pagoda.hal.errors import ConfigError, PagodaError
from pagoda.serving.cli.bench.load import RANDOM, Ask, LoadOptions, arrivals, asks
from pagoda.serving.cli.bench.report import summary, table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.remote import Remote, connect
from pagoda.serving.engine.config import Flag


@dataclass(frozen=True)
class ServeOptions:
    """Where to send it, how fast, and what counts as good."""

    url: Annotated[str, Flag("Address of the server.", ("--base-url",), section="Server")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Flag("Model to ask for; by default the first one served.")] = None
    endpoint: Annotated[Literal["completions", "chat"], Flag("Which API to call.")] = "completions"
    api_key: Annotated[str | None, Flag("Bearer token to send.")] = None
    request_rate: Annotated[float, Flag("Requests a second; inf sends all at once.", section="Pace")] = float("inf")
    burstiness: Annotated[float, Flag("1 is Poisson arrivals, below is burstier, above smoother.")] = 1.0
    max_concurrency: Annotated[int | None, Flag("Most requests at the same time; the others wait their turn.")] = None
    num_warmups: Annotated[int, Flag("Requests to send first, uncounted.")] = 1
    temperature: Annotated[float, Flag("Sampling temperature.")] = 0.0
    ignore_eos: Annotated[bool, Flag("Generate the full length; always so for random prompts.")] = False
    goodput: Annotated[
        dict[str, str], Flag("Limits in ms that a good request keeps: ttft, tpot, e2el; repeatable.", metavar="NAME=MS", section="Report")
    ] = field(default_factory=dict)
    json: Annotated[str | None, Flag("Write the result to a file, or to standard output for -.", ("--output-json",), metavar="FILE")] = None

    def __post_init__(self) -> None:
        if self.request_rate <= 0 or self.burstiness <= 0:
            raise ConfigError("request_rate and burstiness must be above 0")
        for name, limit in self.goodput.items():
            if name not in ("ttft", "tpot", "e2el") or not limit.replace(".", "", 1).isdigit():
                raise ConfigError(f"--goodput {name}={limit} must be one of ttft, tpot, e2el with milliseconds")


@dataclass
class Sample:
    """One request's times, in seconds from its start; `error` where it failed."""

    input_tokens: int = 0
    output_tokens: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Time per output token after the first."""
        return None if self.first is None or self.output_tokens < 2 else (self.total - self.first) / (self.output_tokens - 1)

    def keeps(self, limits: dict[str, str]) -> bool:
        """Whether it is within the goodput limits (ms)."""
        found = {"ttft": self.first, "tpot": self.per_token or 0.0, "e2el": self.total}
        return self.error is None and all((found[name] or 0.0) * 1000 <= float(limit) for name, limit in limits.items())


def run(argv: Sequence[str]) -> int:
    parser = Parser("bench serve", "Send requests to a running server and report what its clients see.")
    parser.add_config(ServeOptions)
    parser.add_config(LoadOptions)
    values = parser.values(argv)
    result = asyncio.run(measure(build(ServeOptions, values), build(LoadOptions, values)))
    if result["options"]["json"] != "-":
        print(_text(result))
    write_json(result["options"]["json"], result)
    return 0 if result["completed"] else 1


async def measure(options: ServeOptions, load: LoadOptions) -> dict[str, Any]:
    """Run the load; the result is the record that `--json` writes."""
    requests = asks(load, as_text=options.endpoint == "chat")
    async with connect(options.url, options.api_key, connections=len(requests) + 1) as remote:
        model = options.model or (await remote.models())[0]["id"]
        for ask in requests[: options.num_warmups]:
            warm = await _one(remote, _body(options, load, model, ask), options.endpoint)
            if warm.error is not None:
                raise PagodaError(warm.error)
        started = time.perf_counter()
        samples = await _send(remote, options, load, model, requests)
        return _result(options, load, model, samples, time.perf_counter() - started)


async def _send(remote: Remote, options: ServeOptions, load: LoadOptions, model: str, requests: list[Ask]) -> list[Sample]:
    times = arrivals(len(requests), options.request_rate, options.burstiness, load.seed)
    turns = asyncio.Semaphore(options.max_concurrency or len(requests))
    started, done = time.perf_counter(), 0

    async def one(ask: Ask, at: float) -> Sample:
        nonlocal done
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        async with turns:
            sample = await _one(remote, _body(options, load, model, ask), options.endpoint)
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{len(requests)}", end="\n" if done == len(requests) else "", file=sys.stderr, flush=True)
        return sample

    return list(await asyncio.gather(*(one(ask, at) for ask, at in zip(requests, times, strict=True))))


def _body(options: ServeOptions, load: LoadOptions, model: str, ask: Ask) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if options.endpoint == "chat" else {"prompt": ask.prompt}
    return {
        "model": model,
        **prompt,
        "max_tokens": ask.output_len,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos or load.dataset == RANDOM,
        "stream_options": {"include_usage": True},
    }


async def _one(remote: Remote, body: dict[str, Any], endpoint: str) -> Sample:
    sample, started, last = Sample(), time.perf_counter(), None
    try:
        async for event in remote.stream("/v1/chat/completions" if endpoint == "chat" else "/v1/completions", body):
            now = time.perf_counter()
            if usage := event.get("usage"):
                sample.input_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if not _has_token(event):
                continue
            if last is None:
                sample.first = now - started
            else:
                sample.gaps.append(now - last)
            last = now
    except PagodaError as error:
        sample.error = str(error)
    sample.total = (last or time.perf_counter()) - started
    if sample.error is None and sample.first is None:
        sample.error = "the stream ended without a token"
    return sample


def _has_token(event: dict[str, Any]) -> bool:
    # a chat's first event only names the role; a token may have no text yet, but then its chunk says so with ""
    choices = event.get("choices") or []
    return any("role" not in choice.get("delta", {}) or choice["delta"].get("content") for choice in choices)


def _result(options: ServeOptions, load: LoadOptions, model: str, samples: list[Sample], seconds: float) -> dict[str, Any]:
    good = [sample for sample in samples if sample.error is None]
    milliseconds = {
        "ttft_ms": [sample.first * 1000 for sample in good if sample.first is not None],
        "tpot_ms": [sample.per_token * 1000 for sample in good if sample.per_token is not None],
        "itl_ms": [gap * 1000 for sample in good for gap in sample.gaps],
        "e2el_ms": [sample.total * 1000 for sample in good],
    }
    output = sum(sample.output_tokens for sample in good)
    return {
        "kind": "serve",
        "pagoda": __version__,
        "model": model,
        "options": asdict(options) | {"api_key": None, "request_rate": str(options.request_rate)},
        "load": asdict(load),
        "seconds": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "errors": sorted({sample.error for sample in samples if sample.error is not None}),
        "input_tokens": sum(sample.input_tokens for sample in good),
        "output_tokens": output,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + sum(sample.input_tokens for sample in good)) / seconds,
        "goodput_per_s": sum(sample.keeps(options.goodput) for sample in good) / seconds if options.goodput else None,
        **{name: summary(values) for name, values in milliseconds.items()},
    }


def _text(result: dict[str, Any]) -> str:
    facts = {
        "completed": f"{result['completed']} of {result['completed'] + result['failed']} requests in {result['seconds']:.2f} s",
        "request rate": f"{result['requests_per_s']:.2f} a second",
        "output": f"{result['output_tokens_per_s']:.1f} tokens a second ({result['output_tokens']} in all)",
        "input + output": f"{result['total_tokens_per_s']:.1f} tokens a second",
    }
    if result["goodput_per_s"] is not None:
        limits = ", ".join(f"{name} ≤ {limit} ms" for name, limit in result["options"]["goodput"].items())
        facts["goodput"] = f"{result['goodput_per_s']:.2f} requests a second with {limits}"
    for error in result["errors"]:
        facts["failed"] = f"{result['failed']}: {error}"
    names = {"ttft_ms": "first token, ms", "tpot_ms": "a token, ms", "itl_ms": "between chunks, ms", "e2el_ms": "whole request, ms"}
    return table(f"{result['model']} at {result['options']['url']}", facts, {label: result[name] for name, label in names.items()})
