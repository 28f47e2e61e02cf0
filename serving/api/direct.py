"""The endpoints that most requests are for, past the router: their paths are whole, so a look into a dictionary finds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from pagoda.hal.errors import PagodaError
from pagoda.serving.api.dialects import path_of
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectMiddleware:
    """Answers POST to `endpoints`, by their paths; all else goes on to `app`. `refused` answers errors of our tree, as it does there."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint], refused: Callable[[Scope, PagodaError], Response]) -> None:
        self._app, self._endpoints, self._refused = app, endpoints, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(path_of(scope)) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            return await self._app(scope, receive, send)
        try:
            response = await endpoint(Request(scope, receive))
        except PagodaError as error:
            response = self._refused(scope, error)
        except ClientDisconnect:  # nobody hears it
            response = Response(status_code=499)
        await response(scope, receive, send)
