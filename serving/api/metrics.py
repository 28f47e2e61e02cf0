"""Prometheus metrics under vLLM's names, so that dashboards move without a change."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from pagoda.serving.api.engine_metrics import LABELS, EngineCollector
from pagoda.serving.api.shared_metrics import metrics_folder
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats
from pagoda.serving.frontend.text_deltas import TextDelta
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

LOT = 4096
"""Values of a histogram, and requests that have ended, that are told of at once."""

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", _SECONDS),
    "inter_token_latency_seconds": ("Time between the tokens of a sequence.", _FAST),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, per request.", _FAST),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", _SECONDS),
    "request_queue_time_seconds": ("Time that a request waited before its first step.", _SECONDS),
    "request_prefill_time_seconds": ("Time from the first step to the first token.", _SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", _SECONDS),
    "request_inference_time_seconds": ("Time from the first step to the last token.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens per request.", _TOKENS),
    "request_max_num_generation_tokens": ("Generated tokens of a request's longest sequence.", _TOKENS),
    "request_params_n": ("The field n of requests.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("The field max_tokens of requests.", _TOKENS),
}
_OF_ENDS = (
    *(f"request_{name}_time_seconds" for name in ("queue", "prefill", "decode", "inference")),
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_time_per_output_token_seconds",
)
"""Histograms that a request's end is told in; see `Metrics.ended`."""


def _merged_registry() -> CollectorRegistry | None:
    """Of all API processes together; None where there is one."""
    if (folder := metrics_folder()) is None:
        return None
    registry = CollectorRegistry()
    MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    return registry


class Lots:
    """One histogram: what it sees is put together before the library's is told of it, in lots."""

    __slots__ = ("_histogram", "_many", "_place", "_values")

    def __init__(self, histogram: Histogram, bounds: Sequence[float]) -> None:
        self._histogram, self._place = histogram, partial(bisect_left, bounds)
        self._values: list[float] = []
        self._many: list[tuple[float, int]] = []

    def add(self, value: float, count: int = 1) -> None:
        """The same value so many times."""
        if count == 1:
            self._values.append(value)
        else:
            self._many.append((value, count))
        if len(self._values) + len(self._many) >= LOT:
            self.flush()

    def extend(self, values: Iterable[float]) -> None:
        """Each of them once."""
        self._values.extend(values)

    def flush(self) -> None:
        (values, self._values), (many, self._many) = (self._values, []), (self._many, [])
        if not values and not many:
            return
        counts = Counts(map(self._place, values))
        for value, count in many:
            counts[self._place(value)] += count
        for bucket, number in counts.items():
            self._histogram._buckets[bucket].inc(number)
        self._histogram._sum.inc(sum(values) + sum(value * count for value, count in many))


class Metrics:
    """One server's registry. Requests are measured through `timer`, engine numbers come with each `render`."""

    def __init__(self, model: str, engine: str = "0") -> None:
        self._registry = CollectorRegistry()
        self._values = (model, engine)
        self._engine = EngineCollector(self._values)
        self._scraped = _merged_registry() or self._registry
        self._scraped.register(self._engine)  # type: ignore[no-untyped-call]
        self.histograms = {
            name: Lots(Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry).labels(*self._values), buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self.gaps = self.histograms["inter_token_latency_seconds"]
        self._rows: list[tuple[float | None, ...]] = []
        self._ended: dict[str, Counter] = {}
        self._finished = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*LABELS, "finished_reason"), registry=self._registry
        )
        rejections = Counter("vllm:admission_rejections", "Requests refused because the queue was full.", LABELS, registry=self._registry)
        self._rejections = rejections.labels(*self._values)
        self._read = Counter(
            "vllm:tool_call_parser_invocations",
            "Answers that were looked through for tool calls, each choice once.",
            ("model_name", "mode", "outcome", "request_type"),
            registry=self._registry,
        )
        self._slept = Histogram(
            "vllm:sleep_mode_operation_duration_seconds",
            "Time that the engine took to give its memory back, and to take it again.",
            ("model_name", "operation"),
            buckets=(0.01, 0.1, 1, 10, 30, 60, 120, 300, 600),
            registry=self._registry,
        )

    def describe_cache(self, facts: EngineFacts) -> None:
        """Publish the shape of the KV pool, once."""
        names = (*LABELS[1:], "block_size", "num_gpu_blocks")
        info = Gauge("vllm:cache_config_info", "Shape of the KV pool.", names, registry=self._registry, multiprocess_mode="mostrecent")
        info.labels(self._values[1], str(facts.tokens_per_page), str(facts.num_pages)).set(1)

    def families(self) -> list[Metric]:
        """Everything that is told, with its help."""
        self.flush()
        return list(self._scraped.collect())

    def timer(self, request: EngineRequest) -> RequestTimer:
        return RequestTimer(self, len(request.prompt), request.params.n, request.params.max_tokens)

    def read_tools(self, request_type: str, *, streaming: bool, called: bool) -> None:
        """A choice has ended in which tool calls were looked for."""
        mode, outcome = "streaming" if streaming else "non_streaming", "tool_call" if called else "no_tool_call"
        self._read.labels(self._values[0], mode, outcome, request_type).inc()

    @contextmanager
    def sleeping(self, operation: str) -> Iterator[None]:
        """Times one that succeeds, `sleep` or `wake`."""
        began = time.monotonic()
        yield
        self._slept.labels(self._values[0], operation).observe(time.monotonic() - began)

    def rejected(self) -> None:
        self._rejections.inc()

    def ended(self, row: tuple[float | None, ...], reason: str) -> None:
        """A request has: what `_OF_ENDS` are told, None where there is nothing to tell."""
        self._rows.append(row)
        if len(self._rows) >= LOT:
            self.flush()
        self.finished(reason)

    def finished(self, reason: str) -> None:
        counter = self._ended.get(reason)
        if counter is None:
            counter = self._ended[reason] = self._finished.labels(*self._values, reason)
        counter.inc()
        if self._scraped is not self._registry:  # another process may be the one that is asked
            self.flush()

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        for name, column in zip(_OF_ENDS, zip(*rows, strict=True), strict=bool(rows)):
            self.histograms[name].extend(value for value in column if value is not None)
        for lots in self.histograms.values():
            lots.flush()

    def render(self, stats: EngineStats) -> bytes:
        """The text exposition with this snapshot of the engine."""
        self._engine.stats = stats
        self.flush()
        return generate_latest(self._scraped)


@dataclass(slots=True)
class RequestTimer:
    """Times one request; `end` may come at any moment, as clients leave when they like."""

    metrics: Metrics
    prompt_tokens: int
    n: int
    max_tokens: int | None
    tokens: int = 0
    queued: float = 0.0
    first: float = 0.0
    last: float = 0.0
    reason: str = "abort"
    of_each: Counts[int] = field(default_factory=Counts)
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = time.monotonic()

    def step(self, deltas: Sequence[TextDelta], queued: float = 0.0) -> None:
        """Count what came; `queued` as in `RequestDelta`."""
        self.queued = queued or self.queued
        new = 0
        for delta in deltas:
            new += len(delta.token_ids)
            if self.n > 1:
                self.of_each[delta.index] += len(delta.token_ids)
            self.reason = delta.finish_reason or self.reason
        if not new:
            return
        now = time.monotonic()
        if not self.first:
            self.first = now
            self.metrics.histograms["time_to_first_token_seconds"].add(now - self.start)
        else:
            self._observe_gaps(deltas, now - self.last)
        self.last = now
        self.tokens += new

    def plain_step(self, count: int) -> None:
        """So many tokens of the only sequence came, and not as the first."""
        now = time.monotonic()
        self.metrics.gaps.add((now - self.last) / count, count)
        self.last = now
        self.tokens += count

    @property
    def spans(self) -> dict[str, float]:
        """Seconds of queue, prefill, decode and inference, of a request that gave tokens."""
        if not self.first:
            return {}
        prefill, decode = max(self.first - self.start - self.queued, 0.0), self.last - self.first
        return {"queue": self.queued, "prefill": prefill, "decode": decode, "inference": prefill + decode}

    def _observe_gaps(self, deltas: Sequence[TextDelta], gap: float) -> None:
        """Tokens of a sequence that come together share the time that they took."""
        for delta in deltas:
            if count := len(delta.token_ids):
                self.metrics.gaps.add(gap / count, count)

    def end(self) -> None:
        spans = self.spans.values() or (None,) * 4
        pace = (self.last - self.first) / (self.tokens - 1) if self.tokens > self.n else None
        took = time.monotonic() - self.start
        longest = max(self.of_each.values(), default=self.tokens)
        self.metrics.ended((*spans, took, self.prompt_tokens, self.tokens, longest, self.n, self.max_tokens, pace), self.reason)
