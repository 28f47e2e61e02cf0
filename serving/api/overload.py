"""Refuses what the queue has no room for by a request's head alone, so that a refusal costs next to nothing when most are refused."""

from __future__ import annotations

from pagoda.hal.errors import PagodaError
from pagoda.serving.api.dialects import path_of
from pagoda.serving.api.refusal import Refusal
from pagoda.serving.api.service import Service
from starlette.types import ASGIApp, Receive, Scope, Send

ENGINE_PATHS = frozenset(
    {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
        "/v1/embeddings", "/classify", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
        "/v1/audio/transcriptions", "/v1/audio/translations",
    }
)  # fmt: skip
"""Where every request takes a place in the queue."""


class OverloadMiddleware:
    """Asks for the smallest place there is; whoever passes is asked again with its true size when that is known."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in ENGINE_PATHS:
            try:
                self._service.check_open()
                self._service.check_room(1)
            except PagodaError as error:
                return await Refusal(error, scope)(scope, receive, send)
        await self._app(scope, receive, send)
