"""Whether requests are traced; OpenTelemetry's packages are optional and are loaded only then."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from pagoda.hal.errors import ConfigError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.metrics import RequestTimer
from pagoda.serving.engine.messages import EngineRequest


class Span(Protocol):
    """Of one request."""

    def failed(self, error: Exception) -> None: ...

    def end(self, timer: RequestTimer) -> None: ...


class Tracing(Protocol):
    """What the server needs of a tracer."""

    def begin(self, request: EngineRequest) -> Span:
        """The span of a request, a child of the trace in which `within` the caller is."""
        ...

    def within(self, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """While it lasts, spans of this task and of those that it starts belong to the trace that `traceparent` names."""
        ...

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        ...


class Endpoint(NamedTuple):
    """Where spans go. target: a URL for OTLP over HTTP, HOST:PORT for gRPC. secure: TLS."""

    http: bool
    target: str
    secure: bool


def tracing_of(config: ServerConfig, model: str) -> Tracing | None:
    """A tracer where there is somebody to trace for; raises as `endpoint_of`."""
    endpoint = endpoint_of(config)
    if endpoint is None:
        return None
    made: Tracing = import_module("pagoda.serving.api.tracing").OtlpTracing(endpoint, model)
    return made


def endpoint_of(config: ServerConfig) -> Endpoint | None:
    """HTTP for a URL with a path, such as http://collector:4318/v1/traces; gRPC for one without, or for HOST:PORT.

    Raises `ConfigError` for an endpoint that is none, and where the packages are missing.
    """
    given = config.otlp_traces_endpoint
    if given is None:
        return None
    url = urlsplit(given if "://" in given else f"grpc://{given}")
    if url.scheme not in ("http", "https", "grpc") or not url.hostname:
        raise ConfigError(f"otlp_traces_endpoint={given} is no endpoint: give http(s)://HOST:PORT for gRPC, with /v1/traces for HTTP")
    if not all(
        map(_found, ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.exporter.otlp.proto.http"))
    ):
        raise ConfigError(f'otlp_traces_endpoint={given} needs OpenTelemetry: pip install "pagoda-llm[otlp]"')
    if url.path.strip("/"):
        return Endpoint(True, given, url.scheme == "https")
    return Endpoint(False, url.netloc if url.port else f"{url.netloc}:4317", url.scheme == "https")


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
