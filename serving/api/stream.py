"""Replies that outlive a moment: server-sent events, and the watch that ends work when the client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from pagoda.hal.errors import PagodaError
from pagoda.serving.api.connection import CONNECTION, Connection
from pagoda.serving.api.dialects import error_event, error_response
from pagoda.serving.api.middleware import PLAIN_SEND
from pagoda.serving.api.outlet import Outlet
from pagoda.serving.api.pulse import pulsed
from pagoda.serving.api.stream_events import DONE
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

log = logging.getLogger("pagoda.api")
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


async def until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`; when the client goes first, cancel it and return None."""
    connection: Connection | None = scope["state"].get(CONNECTION)
    if connection is not None and connection.lost:
        work.close()
        return None
    presence, watch = _Presence(), None
    if connection is not None:
        connection.on_lost = presence.end
    else:
        watch = asyncio.ensure_future(_end_with(presence, receive))
    try:
        return await work
    except asyncio.CancelledError:
        if presence.excuses():
            return None
        raise
    finally:
        if watch is not None:
            watch.cancel()
        if connection is not None:
            connection.on_lost = None


class _Presence:
    """A client's: its end cancels the current task."""

    __slots__ = ("_ended", "_task")

    def __init__(self) -> None:
        self._task, self._ended = asyncio.current_task(), False

    def end(self) -> None:
        assert self._task is not None
        self._ended = True
        self._task.cancel()

    def excuses(self) -> bool:
        """Whether the task was cancelled for this alone, which is then over."""
        return self._ended and self._task is not None and self._task.uncancel() == 0


async def _end_with(presence: _Presence, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    presence.end()


class JsonReply(Response):
    """A reply that takes a while: the work ends when the client goes."""

    def __init__(self, work: Coroutine[Any, Any, msgspec.Struct]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            record = await until_disconnect(scope, receive, self._work)
        except Exception as error:
            log_internal(error)
            return await error_response(error, scope)(scope, receive, send)
        if record is not None:
            await Response(_encode(record), media_type="application/json")(scope, receive, send)


class EventStream(Response):
    """Server-sent events from an async generator of encoded events.

    The status line waits for the first event, so that a request refused by the engine gets its status; a later failure is
    sent as an event with the error object.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], end: bytes = DONE, outlet: Outlet | None = None, keep_alive: float = 0.0
    ) -> None:
        """`end`: what tells the client that the stream is whole. `outlet`: the generator's short way, once it is open. `keep_alive`: after
        so many seconds of silence a comment says that it goes on; 0: never."""
        self._events = pulsed(events, keep_alive, outlet) if keep_alive else events
        self._end, self._outlet = end, outlet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(scope, receive, self._pump(scope, receive, send))

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, write = False, scope.get(PLAIN_SEND, send)
        connection = scope["state"].get(CONNECTION)
        try:
            async with aclosing(self._events) as events:
                async for item in events:
                    if not started:
                        started = True
                        await send(_START if connection is None else _START_CHUNKED)
                    await write({"type": "http.response.body", "body": item, "more_body": True})
                    if self._outlet is not None and connection is not None:
                        self._outlet.connection = connection
                await write({"type": "http.response.body", "body": self._end})
        except OSError:
            log.debug("client left during a stream")
        except Exception as error:
            log_internal(error)
            if not started:
                return await error_response(error, scope)(scope, receive, send)
            await write({"type": "http.response.body", "body": error_event(error, scope)})


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}
_START_CHUNKED = {**_START, "headers": [*_START["headers"], (b"transfer-encoding", b"chunked")]}  # type: ignore[misc]
"""As it would be anyway; an outlet's writing relies on it."""


def log_internal(error: BaseException) -> None:
    """Our own bugs go to the log with their traceback; the client gets an error without it."""
    if not isinstance(error, PagodaError):
        log.error("internal error", exc_info=error)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several generators as they come, with the index of their source; the first error ends all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_feed(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            entry = await queue.get()
            if entry is not None:
                yield entry
                continue
            open_streams -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(index: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | None]) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                queue.put_nowait((index, item))
    finally:
        queue.put_nowait(None)
