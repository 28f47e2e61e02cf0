"""What every request passes on its way in: an id, the trace that it belongs to, the key, and that key's limits."""

from __future__ import annotations

import re

from pagoda.serving.api.desk import Desk
from pagoda.serving.api.dialects import id_headers, path_of
from pagoda.serving.api.errors import RateLimitedError
from pagoda.serving.api.keys import CLIENT, KeyRing, missing_key
from pagoda.serving.api.live_names import hex_tokens
from pagoda.serving.api.refusal import Refusal
from pagoda.serving.api.tracing_of import Tracing
from pagoda.serving.engine.logs import REQUEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready", "/ping", "/version", "/metrics", "/load", "/stats", "/favicon.ico"})
"""What needs no key: the page, which asks for one, and numbers for probes and scrapers."""

UNCOUNTED = OPEN_PATHS | {"/abort_requests", "/inference/v1/abort_requests"}
"""What no key's limits refuse: the above, and the way to end requests that are counted."""

PLAIN_SEND = "pagoda.send"
"""In the scope: the `send` that parts of a body may take past the middlewares, none of which looks at them."""

_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIdMiddleware:
    """Gives every request an id (the client's own where it sent a usable one) and says it in the reply's `X-Request-Id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._fresh = app, hex_tokens(16)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if given and _ID.fullmatch(given) else next(self._fresh).encode()
        scope.setdefault("state", {})["request_id"] = name = request_id.decode()
        REQUEST.set(name)  # a request is a task of its own

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, request_id) for name in id_headers(scope)]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        scope[PLAIN_SEND] = send
        await self._app(scope, receive, send_with_id)


class TraceMiddleware:
    """What a request does belongs to the trace that its `traceparent` names."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        with self._tracing.within(headers):
            await self._app(scope, receive, send)


class KeyMiddleware:
    """Lets requests in that bring one of the keys as a bearer token (or as `x-api-key`)."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app, self._ring = app, KeyRing(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_pass(scope):
            return await Refusal(missing_key(), scope)(scope, receive, send)
        await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or path_of(scope) in OPEN_PATHS or self._has_key(scope)

    def _has_key(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        name = self._ring.name_of(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
        if name is not None:
            scope.setdefault("state", {})["key"] = name
            CLIENT.set(name)  # a request is a task of its own
        return name is not None


class KeyLimitsMiddleware:
    """Refuses what is above a client's limits with 429; probes, metrics and the page are not counted."""

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self._app, self._desk = app, desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or path_of(scope) in UNCOUNTED:
            return await self._app(scope, receive, send)
        name = scope.get("state", {}).get("key") or (scope.get("client") or ("local",))[0]
        try:
            await self._desk.enter(name)
        except RateLimitedError as error:
            return await Refusal(error, scope)(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            self._desk.leave(name)
