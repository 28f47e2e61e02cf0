"""The ASGI application: every endpoint, mounted over one `Service`."""

from __future__ import annotations

from typing import Any

import pagoda
from pagoda.hal.errors import NotFoundError, PagodaError, RequestError
from pagoda.serving.api.aborts import Aborts
from pagoda.serving.api.adapters import AdapterEndpoints
from pagoda.serving.api.anthropic.messages import Messages
from pagoda.serving.api.audio.transcriptions import Transcriptions
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.dialects import error_response
from pagoda.serving.api.direct import DirectMiddleware
from pagoda.serving.api.errors import BodyTooLargeError, MediaTypeError
from pagoda.serving.api.keys import keys_of
from pagoda.serving.api.middleware import KeyLimitsMiddleware, KeyMiddleware, RequestIdMiddleware, TraceMiddleware
from pagoda.serving.api.openai.chat import Chat
from pagoda.serving.api.openai.completions import Completions
from pagoda.serving.api.openai.models import Models
from pagoda.serving.api.openai.responses import Responses
from pagoda.serving.api.openai.tokens import Tokens
from pagoda.serving.api.operations import Operations
from pagoda.serving.api.overload import OverloadMiddleware
from pagoda.serving.api.pooling.scores import Scores
from pagoda.serving.api.pooling.vectors import Vectors
from pagoda.serving.api.profiling import Profiling
from pagoda.serving.api.refusal import Refusal
from pagoda.serving.api.scale_out import ScaleOut
from pagoda.serving.api.service import Service
from pagoda.serving.api.sleeping import Sleeping
from pagoda.serving.api.user_middleware import user_middleware
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope


def build_app(service: Service, settings: dict[str, Any] | None = None) -> Starlette:
    """The application. `settings` is what `/server_info` shows of the configuration."""
    bodies = BodyReader(service.config.max_request_bytes)
    busiest = {"/v1/completions": Completions(service, bodies).create, "/v1/chat/completions": Chat(service, bodies).create}
    service.metrics.describe_cache(service.client.facts)
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in busiest.items()),
            *_openai_routes(service, bodies),
            *_anthropic_routes(service, bodies),
            *_pooling_routes(service, bodies),
            *_scale_out_routes(ScaleOut(service, bodies), Aborts(service, bodies)),
            *_audio_routes(service),
            *_sleep_routes(Sleeping(service)),
            *_profile_routes(Profiling(service)),
            *_operations_routes(Operations(service, pagoda.__version__, settings or {}), docs=not service.config.disable_fastapi_docs),
        ],
        middleware=[*_middleware(service), Middleware(DirectMiddleware, endpoints=busiest, refused=_refused)],
        exception_handlers={PagodaError: _ours, HTTPException: _http, ClientDisconnect: _gone, Exception: _bug},
    )


def _openai_routes(service: Service, bodies: BodyReader) -> list[Route]:
    models, tokens, adapters = Models(service), Tokens(service, bodies), AdapterEndpoints(service, bodies)
    return [
        *_responses_routes(Responses(service, bodies)),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.get),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
    ]


def _responses_routes(responses: Responses) -> list[Route]:
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/render", responses.render, methods=["POST"]),
        Route("/v1/responses/input_tokens", responses.count, methods=["POST"]),
        Route(one, responses.get),
        Route(one, responses.delete, methods=["DELETE"]),
        Route(one + "/cancel", responses.cancel, methods=["POST"]),
        Route(one + "/input_items", responses.input_items),
    ]


def _anthropic_routes(service: Service, bodies: BodyReader) -> list[Route]:
    messages = Messages(service, bodies)
    return [
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/render", messages.render, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count, methods=["POST"]),
    ]


def _pooling_routes(service: Service, bodies: BodyReader) -> list[Route]:
    vectors, scores = Vectors(service, bodies), Scores(service, bodies)
    return [
        Route("/v1/embeddings", vectors.embeddings, methods=["POST"]),
        Route("/classify", vectors.classify, methods=["POST"]),
        Route("/pooling", vectors.pooling, methods=["POST"]),
        *(Route(path, scores.score, methods=["POST"]) for path in ("/score", "/v1/score")),
        *(Route(path, scores.rerank, methods=["POST"]) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    ]


def _scale_out_routes(scale_out: ScaleOut, aborts: Aborts) -> list[Route]:
    return [
        Route("/inference/v1/generate", scale_out.generate, methods=["POST"]),
        Route("/v1/completions/render", scale_out.render_completion, methods=["POST"]),
        Route("/v1/chat/completions/render", scale_out.render_chat, methods=["POST"]),
        Route("/abort_requests", aborts.of_trainers, methods=["POST"]),
        Route("/inference/v1/abort_requests", aborts.of_routers, methods=["POST"]),
    ]


def _audio_routes(service: Service) -> list[Route]:
    heard, turned = Transcriptions(service, "transcribe"), Transcriptions(service, "translate")
    return [
        Route("/v1/audio/transcriptions", heard.create, methods=["POST"]),
        Route("/v1/audio/translations", turned.create, methods=["POST"]),
    ]


def _operations_routes(operations: Operations, docs: bool) -> list[Route]:
    return [
        Route("/", operations.page),
        Route("/health", operations.health),
        Route("/ready", operations.health),
        Route("/live", operations.live),
        Route("/ping", operations.health, methods=["GET", "POST"]),
        Route("/version", operations.version),
        Route("/load", operations.load),
        Route("/metrics", operations.metrics),
        Route("/stats", operations.stats),
        Route("/server_info", operations.server_info),
        *([Route("/openapi.json", operations.openapi)] if docs else []),
        Route("/reset_prefix_cache", operations.reset_prefix_cache, methods=["POST"]),
    ]


def _sleep_routes(sleeping: Sleeping) -> list[Route]:
    return [
        Route("/sleep", sleeping.sleep, methods=["POST"]),
        Route("/wake_up", sleeping.wake_up, methods=["POST"]),
        Route("/is_sleeping", sleeping.is_sleeping),
    ]


def _profile_routes(profiling: Profiling) -> list[Route]:
    return [
        Route("/start_profile", profiling.start, methods=["POST"]),
        Route("/stop_profile", profiling.stop, methods=["POST"]),
    ]


def _middleware(service: Service) -> list[Middleware]:
    config = service.config
    out = [*user_middleware(config.middleware), Middleware(RequestIdMiddleware)]
    if service.tracing is not None:
        out.append(Middleware(TraceMiddleware, tracing=service.tracing))
    if config.allowed_origins:
        out.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=list(config.allowed_methods),
                allow_headers=list(config.allowed_headers),
                allow_credentials=config.allow_credentials,
                expose_headers=["X-Request-Id"],
            )
        )
    if keys := keys_of(config):
        out.append(Middleware(KeyMiddleware, keys=keys))
    out.append(Middleware(OverloadMiddleware, service=service))
    if config.limits_keys:
        out.append(Middleware(KeyLimitsMiddleware, desk=service.desk))
    return out


async def _ours(request: Request, error: Exception) -> Response:
    return _refused(request.scope, error)


def _refused(scope: Scope, error: Exception) -> Response:
    unread = isinstance(error, BodyTooLargeError | MediaTypeError)
    return Refusal(error, scope) if unread else error_response(error, scope)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = NotFoundError if error.status_code == 404 else RequestError
    what = {404: "there is nothing at", 405: "this method is not allowed at"}.get(error.status_code, error.detail)
    response = error_response(kind(f"{what} {request.method} {request.url.path}"), request.scope)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["Allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """Those of every route at this path: a path may have several, and the error names only the first one's. One that is spelled out is
    no id of those that have one there."""
    here = [route for route in request.app.routes if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE]
    spelled = [route for route in here if not route.param_convertors]
    return {method for route in spelled or here for method in route.methods or ()}


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _bug(request: Request, error: Exception) -> Response:
    # the server logs the traceback itself
    return error_response(error, request.scope)
