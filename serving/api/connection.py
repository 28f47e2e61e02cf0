"""uvicorn's protocol, and what it tells an application of a connection: whether it takes more, and a way to write without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CONNECTION = "pagoda.connection"
"""Of a request's `scope["state"]`: its `Connection`."""


class Connection:
    """A client's connection.

    Attributes:
        writable: it is open, and no more waits for the client than may.
        lost: it has ended. on_lost: called when it ends.
    """

    __slots__ = ("_write", "lost", "on_lost", "writable")

    def __init__(self) -> None:
        self.writable = self.lost = False
        self.on_lost: Callable[[], None] | None = None
        self._write: Callable[[bytes], None]

    def opened(self, transport: asyncio.WriteTransport) -> None:
        self._write, self.writable = transport.write, True

    def end(self) -> None:
        self.writable, self.lost = False, True
        if self.on_lost is not None:
            self.on_lost()

    def write_chunk(self, part: bytes) -> None:
        """One part of a body in chunked encoding, when `writable`."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


class StreamProtocol(HttpToolsProtocol):
    """Beside what uvicorn does, keeps the `Connection` of requests' states up to date and tells each that its client has gone."""

    def __init__(self, *settings: Any, app_state: dict[str, Any], **more: Any) -> None:
        self.stream_connection = Connection()
        self._unanswered: list[RequestResponseCycle] = []
        super().__init__(*settings, app_state={**app_state, CONNECTION: self.stream_connection}, **more)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.stream_connection.opened(transport)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self._unanswered = [one for one in self._unanswered if not one.response_complete]
            self._unanswered.append(self.cycle)

    def pause_writing(self) -> None:
        self.stream_connection.writable = False
        super().pause_writing()

    def resume_writing(self) -> None:
        self.stream_connection.writable = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stream_connection.end()
        for one in self._unanswered:  # of several requests sent at once uvicorn tells the last one, which may not be the one that runs
            if not one.response_complete:
                one.disconnected = True
                one.message_event.set()
        super().connection_lost(exc)
