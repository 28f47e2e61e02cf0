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
from pagoda.serving.cli.bench.load import Ask, LoadOptions, arrivals, asks, ramp
from pagoda.serving.cli.bench.report import summary, table, write_json
from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.remote import Remote, connect
from pagoda.serving.engine.config import Flag


@dataclass(frozen=True)
class ServeOptions:
    """Where to send it, how fast, and what counts as good."""

    url: Annotated[str, Flag("Address of the server.", ("--base-url",), section="Server")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Flag("Model to ask for; by default the first one served.")] = None
    endpoint: Annotated[
        Literal["completions", "chat", "/v1/completions", "/v1/chat/completions"], Flag("Which API to call, by name or path.")
    ] = "completions"
    api_key: Annotated[str | None, Flag("Bearer token to send.")] = None
    request_rate: Annotated[float, Flag("Requests a second; inf sends all at once.", section="Pace")] = float("inf")
    burstiness: Annotated[float, Flag("1 is Poisson arrivals, below is burstier, above smoother.")] = 1.0
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, Flag("Let the rate go from --ramp-up-start-rps to --ramp-up-end-rps over the run.")
    ] = None
    ramp_up_start_rps: Annotated[float | None, Flag("Requests a second at the start of a ramp.")] = None
    ramp_up_end_rps: Annotated[float | None, Flag("Requests a second at its end.")] = None
    max_concurrency: Annotated[int | None, Flag("Most requests at the same time; the others wait their turn.")] = None
    num_warmups: Annotated[int, Flag("Requests to send first, uncounted.")] = 1
    temperature: Annotated[float, Flag("Sampling temperature.")] = 0.0
    ignore_eos: Annotated[bool, Flag("Generate the full length; always so for random prompts.")] = False
    goodput: Annotated[
        tuple[str, ...],
        Flag(
            "Limits in ms that a good request keeps: ttft, tpot, e2el, as in ttft=500; several may follow.",
            metavar="NAME=MS",
            section="Report",
        ),
    ] = ()
    metric_percentiles: Annotated[str, Flag("Percentiles to report, separated by commas.", metavar="P,P")] = "50,90,95,99"
    json: Annotated[
        str | None,
        Flag("Write the result to a file, or to standard output for -.", ("--output-json", "--result-filename"), metavar="FILE"),
    ] = None

    def __post_init__(self) -> None:
        if self.request_rate <= 0 or self.burstiness <= 0:
            raise ConfigError("request_rate and burstiness must be above 0")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        ramped = self.ramp_up_strategy is not None
        if ramped != all(rate is not None and rate > 0 for rate in ends) or ramped != any(rate is not None for rate in ends):
            raise ConfigError("a ramp needs --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps, with rates above 0")
        for limit in self.goodput:
            name, _, milliseconds = limit.replace(":", "=").partition("=")
            if name not in ("ttft", "tpot", "e2el") or not milliseconds.replace(".", "", 1).isdigit():
                raise ConfigError(f"--goodput {limit} must be one of ttft, tpot, e2el with milliseconds, as in ttft=500")
        if not all(part.replace(".", "", 1).isdigit() and 0 <= float(part) <= 100 for part in self.metric_percentiles.split(",")):
            raise ConfigError(f"metric_percentiles={self.metric_percentiles!r} must be numbers from 0 to 100, separated by commas")

    @property
    def limits(self) -> dict[str, float]:
        """The goodput's limits in ms."""
        return {name: float(ms) for name, _, ms in (limit.replace(":", "=").partition("=") for limit in self.goodput)}

    @property
    def is_chat(self) -> bool:
        return "chat" in self.endpoint

    @property
    def percentiles(self) -> tuple[float, ...]:
        return tuple(float(part) if "." in part else int(part) for part in self.metric_percentiles.split(","))

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds after the start at which each request leaves."""
        if self.ramp_up_strategy is None:
            return arrivals(count, self.request_rate, self.burstiness, seed)
        assert self.ramp_up_start_rps is not None and self.ramp_up_end_rps is not None
        rates = ramp(count, self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy == "exponential")
        return arrivals(count, rates, self.burstiness, seed)


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

    def keeps(self, limits: dict[str, float]) -> bool:
        """Whether it is within the goodput limits (ms)."""
        found = {"ttft": self.first, "tpot": self.per_token or 0.0, "e2el": self.total}
        return self.error is None and all((found[name] or 0.0) * 1000 <= limit for name, limit in limits.items())


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
    requests = asks(load, as_text=options.is_chat)
    async with connect(options.url, options.api_key, connections=len(requests) + 1) as remote:
        model = options.model or (await remote.models())[0]["id"]
        for ask in requests[: options.num_warmups]:
            warm = await _one(remote, _body(options, load, model, ask), options.is_chat)
            if warm.error is not None:
                raise PagodaError(warm.error)
        started = time.perf_counter()
        samples = await _send(remote, options, load, model, requests)
        return _result(options, load, model, samples, time.perf_counter() - started)


async def _send(remote: Remote, options: ServeOptions, load: LoadOptions, model: str, requests: list[Ask]) -> list[Sample]:
    times = options.times(len(requests), load.seed)
    turns = asyncio.Semaphore(options.max_concurrency or len(requests))
    started, done = time.perf_counter(), 0

    async def one(ask: Ask, at: float) -> Sample:
        nonlocal done
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        async with turns:
            sample = await _one(remote, _body(options, load, model, ask), options.is_chat)
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{len(requests)}", end="\n" if done == len(requests) else "", file=sys.stderr, flush=True)
        return sample

    return list(await asyncio.gather(*(one(ask, at) for ask, at in zip(requests, times, strict=True))))


def _body(options: ServeOptions, load: LoadOptions, model: str, ask: Ask) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if options.is_chat else {"prompt": ask.prompt}
    return {
        "model": model,
        **prompt,
        "max_tokens": ask.output_len,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos or load.drawn,
        "stream_options": {"include_usage": True},
    }


async def _one(remote: Remote, body: dict[str, Any], chat: bool) -> Sample:
    sample, started, last = Sample(), time.perf_counter(), None
    try:
        async for event in remote.stream("/v1/chat/completions" if chat else "/v1/completions", body):
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
        "options": asdict(options) | {"api_key": None, "request_rate": str(options.request_rate), "goodput": list(options.goodput)},
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
        "goodput_per_s": sum(sample.keeps(options.limits) for sample in good) / seconds if options.goodput else None,
        **{name: summary(values, options.percentiles) for name, values in milliseconds.items()},
    }


def _text(result: dict[str, Any]) -> str:
    facts = {
        "completed": f"{result['completed']} of {result['completed'] + result['failed']} requests in {result['seconds']:.2f} s",
        "request rate": f"{result['requests_per_s']:.2f} a second",
        "output": f"{result['output_tokens_per_s']:.1f} tokens a second ({result['output_tokens']} in all)",
        "input + output": f"{result['total_tokens_per_s']:.1f} tokens a second",
    }
    if result["goodput_per_s"] is not None:
        facts["goodput"] = f"{result['goodput_per_s']:.2f} requests a second with {', '.join(result['options']['goodput'])} ms"
    for error in result["errors"]:
        facts["failed"] = f"{result['failed']}: {error}"
    names = {"ttft_ms": "first token, ms", "tpot_ms": "a token, ms", "itl_ms": "between chunks, ms", "e2el_ms": "whole request, ms"}
    return table(f"{result['model']} at {result['options']['url']}", facts, {label: result[name] for name, label in names.items()})
