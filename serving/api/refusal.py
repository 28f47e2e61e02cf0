"""Errors that are told before a request's body was read: at once, with what becomes of the body and of the connection."""

from __future__ import annotations

import asyncio

from pagoda.serving.api.dialects import error_response
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEPT_BYTES = 64 << 10
"""Up to a body so long the connection is kept: reading it costs less than a new connection."""

LINGER_BYTES, LINGER_SECONDS = 16 << 20, 5.0
"""How much of a body is read away, and for how long. A connection closed on a client that still sends is reset, and the answer is lost."""


class Refusal(Response):
    """An error's reply. Its body goes out whole before the request's is read away."""

    def __init__(self, error: BaseException, scope: Scope) -> None:
        told = error_response(error, scope)
        self.status_code, self.background, self.body, self.raw_headers = told.status_code, None, told.body, told.raw_headers
        if not _keeps_connection(dict(scope["headers"])):
            self.raw_headers.append((b"connection", b"close"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # who waits for a 100 has sent nothing, and will not
        if b"expect" not in dict(scope["headers"]):
            await _read_away(receive)
        await send({"type": "http.response.body"})


def _keeps_connection(headers: dict[bytes, bytes]) -> bool:
    length = headers.get(b"content-length", b"0")
    known = length.isdigit() and int(length) <= KEPT_BYTES
    return known and b"transfer-encoding" not in headers and b"expect" not in headers


async def _read_away(receive: Receive) -> None:
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0:
                message = await receive()
                if not message.get("more_body"):
                    return
                left -= len(message["body"])
    except TimeoutError:
        return
