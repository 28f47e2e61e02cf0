"""Spans as real OTLP receivers get them, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from pagoda.hal.errors import ConfigError
from pagoda.serving.api import tracing
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.inference import Inference
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from pagoda.serving.api.tracing_of import Endpoint, endpoint_of
from patience import eventually
from toy_engine import ToyEngine
from toy_server import toy_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Received:
    """Spans that have come."""

    def __init__(self) -> None:
        self.resources: list[Any] = []
        self.endpoint = ""

    def take(self, request: otlp.ExportTraceServiceRequest) -> None:
        self.resources += request.resource_spans

    def spans(self) -> list[Any]:
        return [span for resource in self.resources for scope in resource.scope_spans for span in scope.spans]

    def one(self) -> tuple[Any, dict[str, Any]]:
        [span] = self.spans()
        return span, attributes(span.attributes)


def attributes(given: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in given}


@contextmanager
def over_grpc() -> Iterator[Received]:
    received = Received()

    class Collector(otlp_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.take(request)
            return otlp.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def over_http() -> Iterator[Received]:
    received = Received()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            received.take(otlp.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        received.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield received
        finally:
            server.shutdown()


@pytest.mark.parametrize("collector", [over_grpc, over_http])
async def test_a_request_is_a_span_of_its_clients_trace(collector: Any) -> None:
    with collector() as received:
        async with toy_server(ToyEngine(delay=0.02), otlp_traces_endpoint=received.endpoint) as toy:
            body = {"prompt": "abcd", "max_tokens": 3, "temperature": 0.25, "top_p": 0.5, "n": 2}
            assert (await toy.http.post("/v1/completions", json=body, headers=HEADERS)).status_code == 200
        span, seen = received.one()
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == ("llm_request", TRACE, PARENT, "vendor=1")
    assert span.kind == span.SPAN_KIND_SERVER and span.status.code == 0
    assert attributes(received.resources[0].resource.attributes)["service.name"] == "pagoda"
    assert seen["gen_ai.request.id"].startswith("cmpl-") and seen["gen_ai.response.model"] == "toy"
    assert (seen["gen_ai.request.max_tokens"], seen["gen_ai.request.n"]) == (3, 2)
    assert (seen["gen_ai.request.temperature"], seen["gen_ai.request.top_p"]) == (0.25, 0.5)
    assert (seen["gen_ai.usage.prompt_tokens"], seen["gen_ai.usage.completion_tokens"]) == (5, 6)
    assert seen["gen_ai.response.finish_reasons"] == ["length"]
    first, all_of_it = seen["gen_ai.latency.time_to_first_token"], seen["gen_ai.latency.e2e"]
    assert 0.02 <= first < all_of_it and all_of_it >= 0.06
    assert seen["gen_ai.latency.time_in_queue"] == pytest.approx(0.005)
    assert seen["gen_ai.latency.time_in_model_prefill"] == pytest.approx(first - 0.005)
    parts = seen["gen_ai.latency.time_in_model_prefill"] + seen["gen_ai.latency.time_in_model_decode"]
    assert seen["gen_ai.latency.time_in_model_inference"] == pytest.approx(parts)
    assert span.end_time_unix_nano > span.start_time_unix_nano


async def test_chats_streams_and_calls_over_grpc_belong_to_their_traces() -> None:
    with over_grpc() as received:
        async with toy_server(otlp_traces_endpoint=received.endpoint) as toy:
            chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            for path, fields in (("chat/completions", {}), ("messages", {"model": "toy", "max_tokens": 4})):
                assert (await toy.http.post(f"/v1/{path}", json=chat | fields, headers=HEADERS)).status_code == 200
            server = grpc.aio.server()
            add_InferenceServicer_to_server(Inference(toy.service), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await InferenceStub(channel).Generate(pb.GenerateRequest(text="a"), metadata=tuple(HEADERS.items()))
            await server.stop(None)
            await toy.complete("alone")
        *named, alone = received.spans()
    assert [(span.trace_id.hex(), span.parent_span_id.hex()) for span in named] == [(TRACE, PARENT)] * 3
    assert alone.trace_id.hex() != TRACE and not alone.parent_span_id


async def test_failures_and_clients_that_leave_are_told() -> None:
    engine = ToyEngine(held=3)
    with over_grpc() as received:
        async with toy_server(engine, otlp_traces_endpoint=received.endpoint) as toy:
            leaving = asyncio.ensure_future(toy.complete("abc", max_tokens=900, ignore_eos=True))
            await eventually(lambda: engine.generated == 3)
            leaving.cancel()
            await eventually(lambda: not engine.live)
            engine.dead = "it was killed"
            assert (await toy.complete("a")).status_code == 503
        left, failed = received.spans()
    assert attributes(left.attributes)["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes(left.attributes)["gen_ai.usage.completion_tokens"] > 0
    assert failed.status.code == failed.status.STATUS_CODE_ERROR and failed.status.message == "it was killed"
    assert attributes(failed.attributes)["error.type"] == "EngineDeadError"


async def test_a_receiver_that_is_not_there_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LAST_WORD", 0.05)
    async with toy_server(otlp_traces_endpoint="http://127.0.0.1:9") as toy:
        assert (await toy.complete("abc")).status_code == 200


async def test_a_receiver_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LAST_WORD", 0.05)
    monkeypatch.setattr(tracing, "PATIENCE", 100.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with toy_server(otlp_traces_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces") as toy:
            assert (await toy.complete("abc")).status_code == 200
        assert any(thread.name == "traces" for thread in threading.enumerate()), "it still waits, and we do not"


def test_endpoints() -> None:
    def of(given: str) -> Endpoint | None:
        return endpoint_of(ServerConfig(otlp_traces_endpoint=given))

    assert of("http://collector:4318/v1/traces") == Endpoint(True, "http://collector:4318/v1/traces", False)
    assert of("https://collector/v1/traces") == Endpoint(True, "https://collector/v1/traces", True)
    assert of("http://collector:4317") == of("grpc://collector") == of("collector:4317/") == Endpoint(False, "collector:4317", False)
    assert of("https://[::1]:4400") == Endpoint(False, "[::1]:4400", True)
    assert endpoint_of(ServerConfig()) is None
    for wrong in ("", "ftp://collector", "http://"):
        with pytest.raises(ConfigError, match="is no endpoint"):
            of(wrong)
