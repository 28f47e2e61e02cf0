"""A span for each request, sent over OTLP with vLLM's names where the meanings agree; needs OpenTelemetry's packages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pagoda
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pagoda.serving.api.errors import message_of
from pagoda.serving.api.metrics import RequestTimer
from pagoda.serving.api.tracing_of import Endpoint
from pagoda.serving.engine.messages import EngineRequest

SPAN = "llm_request"
LAST_WORD = 3.0
"""Seconds to send the last spans in."""
PATIENCE = 5.0
"""Seconds that a receiver gets to take a batch, retries included."""
_LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "inference": "gen_ai.latency.time_in_model_inference",
}


class OtlpTracing:
    """See `tracing_of.Tracing`."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._model = model
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "pagoda", "service.version": pagoda.__version__}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_exporter_of(endpoint)))
        self._tracer = self._provider.get_tracer("pagoda.serving", pagoda.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, request: EngineRequest) -> RequestSpan:
        return RequestSpan(self._tracer.start_span(SPAN, kind=trace.SpanKind.SERVER, attributes=_asked(request, self._model)))

    @contextmanager
    def within(self, headers: Mapping[str, str]) -> Iterator[None]:
        token = context.attach(self._propagator.extract(headers))
        try:
            yield
        finally:
            context.detach(token)

    def close(self) -> None:
        # a receiver that is not there must not hold up our end, and the library gives it half a minute
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(LAST_WORD)


class RequestSpan:
    """One request's."""

    def __init__(self, span: trace.Span) -> None:
        self._span, self._began = span, time.monotonic()

    def failed(self, error: Exception) -> None:
        self._span.set_status(trace.Status(trace.StatusCode.ERROR, message_of(error)))
        self._span.set_attribute("error.type", type(error).__name__)

    def end(self, timer: RequestTimer) -> None:
        self._span.set_attribute("gen_ai.usage.completion_tokens", timer.tokens)
        self._span.set_attribute("gen_ai.latency.e2e", time.monotonic() - timer.start)
        self._span.set_attribute("gen_ai.response.finish_reasons", (timer.reason,))
        if timer.first:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", timer.first - timer.start)
        for name, seconds in timer.spans.items():
            self._span.set_attribute(_LATENCIES[name], seconds)
        self._span.end()


def _asked(request: EngineRequest, model: str) -> dict[str, str | int | float]:
    params = request.params
    found: dict[str, str | int | float | None] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": request.adapter or model,
        "gen_ai.usage.prompt_tokens": len(request.prompt),
    }
    if request.pooling is None:
        found |= {"gen_ai.request.n": params.n, "gen_ai.request.max_tokens": params.max_tokens}
        found |= {"gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p}
    return {name: value for name, value in found.items() if value is not None}


def _exporter_of(endpoint: Endpoint) -> SpanExporter:
    if endpoint.http:
        return HttpExporter(endpoint=endpoint.target, timeout=PATIENCE)
    return GrpcExporter(endpoint=endpoint.target, insecure=not endpoint.secure, timeout=PATIENCE)
