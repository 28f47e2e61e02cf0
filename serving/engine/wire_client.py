"""A client of an engine in another process, over ZMQ in the caller's asyncio loop: requests out, deltas and answers in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from pagoda.hal.errors import EngineDeadError, PagodaError, RequestError
from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats, RequestDelta, StepDeltas
from pagoda.serving.engine.streams import Streams
from pagoda.serving.engine.wire import (
    Abort,
    Adapters,
    Answer,
    Call,
    Deltas,
    Rejected,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
    error_of,
)

GATHER_SECONDS = 0.001
"""After a sending the next one waits so long for what else comes; whoever comes by himself waits for nobody."""

MOST_AT_ONCE = 256
"""Messages that are read before the loop may do something else."""

LoadedAdapters = list[tuple[str, str, str | None]]


class WireClient:
    """See `EngineClient`. Its two sockets are files in `folder`; the engine is told of them by the client that started it.

    Attributes:
        on_adapters: called with all adapters whenever any client has loaded or unloaded one.
    """

    facts: EngineFacts

    def __init__(self, folder: Path, name: str = "") -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = Streams()
        self.requests_address, self.answers_address = (f"ipc://{folder / (kind + name)}" for kind in ("requests", "answers"))
        self.on_adapters: Callable[[LoadedAdapters], None] = lambda loaded: None
        self._context = zmq.Context()
        self._requests: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._answers: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        for socket in (self._requests, self._answers):
            socket.set_hwm(0)  # nothing is dropped, no send waits: the scheduler bounds what is under way
        self._answers.bind(self.answers_address)
        self._outgoing: list[bytes] = []
        self._flushed = 0.0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    def connect(self, facts: EngineFacts) -> None:
        """The engine has loaded."""
        self.facts = facts
        self._requests.connect(self.requests_address)
        self._loop.add_reader(self._answers.fileno(), self._read)
        self._loop.call_soon(self._read)

    def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        return self._streams.generate(request, lambda one: self.send(Submit(one)), lambda ids: self.send(Abort(ids)), patience, plain)

    async def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        self.send(Abort(request_ids, sequence))

    async def stats(self) -> EngineStats:
        return msgspec.convert(await self.call("stats"), EngineStats)

    async def health(self) -> None:
        self._streams.check()

    async def call(self, method: str, **arguments: object) -> Any:
        self._streams.check()
        self._number += 1
        future = self._calls[self._number] = self._loop.create_future()
        self.send(Call(self._number, method, arguments))
        return await future

    async def close(self) -> None:
        self.fail(EngineDeadError("the engine was closed"))
        if not self._answers.closed:
            self._loop.remove_reader(self._answers.fileno())
        self._flush()
        self._requests.close(linger=0)
        self._answers.close(linger=0)
        self._context.term()

    def send(self, message: ToEngine) -> None:
        """Raises `RequestError` for what cannot cross, such as numbers beyond 64 bits in fields that may hold anything."""
        if self._requests.closed:
            return
        try:
            text = encode(message)
        except (OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise RequestError(f"the request cannot be handed to the engine: {error}") from None
        if not self._outgoing:
            wait = self._flushed + GATHER_SECONDS - time.monotonic()
            self._loop.call_later(wait, self._flush) if wait > 0 else self._loop.call_soon(self._flush)
        self._outgoing.append(text)

    def _flush(self) -> None:
        """All that was said lately, at once: each sending wakes a thread here and one there. The engine reads message by message."""
        self._flushed = time.monotonic()
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and not self._requests.closed:
            self._requests.send_multipart(outgoing, zmq.NOBLOCK)

    def fail(self, error: EngineDeadError) -> None:
        """The engine has ended: whoever waits is told, and whoever comes."""
        self._streams.fail(error)
        for number in list(self._calls):
            self._answer(number, None, error)

    def _read(self) -> None:
        """All that has come. Steps that came together are delivered together, so that a process that falls behind has less to do."""
        if self._answers.closed:  # meanwhile, before a call that was due
            return
        steps: list[StepDeltas] = []
        for _ in range(MOST_AT_ONCE):
            try:
                text = self._answers.recv(zmq.NOBLOCK)
            except zmq.Again:  # only now does the socket's descriptor tell of the next
                break
            match decode_from_engine(text):
                case Deltas(deltas):
                    steps.append(deltas)
                case other:
                    self._handle(other)
        else:
            self._loop.call_soon(self._read)
        self._streams.deliver(*steps)

    def _handle(self, message: Rejected | Answer | Adapters) -> None:
        match message:
            case Rejected(request_id, error):
                self._streams.reject(request_id, error_of(error))
            case Answer(number, value, error):
                self._answer(number, value, error_of(error) if error is not None else None)
            case Adapters(loaded):
                self.on_adapters(loaded)

    def _answer(self, number: int, value: Any, error: PagodaError | None) -> None:
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)
