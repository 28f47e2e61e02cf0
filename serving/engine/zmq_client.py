"""The engine in a process of its own: the client that the server uses, over ZMQ in the caller's asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.engine.child import Child, engine_child
from pagoda.serving.engine.inprocess_client import EngineStarter
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats, RequestDelta
from pagoda.serving.engine.streams import Streams
from pagoda.serving.engine.wire import Abort, Answer, Call, Deltas, Rejected, Submit, ToEngine, decode_from_engine, encode, error_of


class ZmqClient:
    """See `EngineClient`. Made by `await ZmqClient.start(starter)` in the loop that will use it."""

    facts: EngineFacts

    def __init__(self, child: Child | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = Streams()
        self._folder = Path(tempfile.mkdtemp(prefix="pagoda-"))
        self._context = zmq.Context()
        self._requests: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._answers = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket in (self._requests, self._answers):
            socket.set_hwm(0)  # nothing is dropped, no send waits: the scheduler bounds what is under way
        self._answers.bind(self._address("answers"))
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._child = child or engine_child()
        self._receiver: asyncio.Task[None] | None = None
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    @classmethod
    async def start(cls, starter: EngineStarter, child: Child | None = None) -> ZmqClient:
        """Start the process, unless `child` is there already, and wait until it has loaded. Raises the error that loading raised there."""
        client = cls(child)
        client._child.connection.send((starter, client._address("requests"), client._address("answers")))
        client._watcher.start()
        try:
            client.facts = await client._ready
        except BaseException:
            client._child.process.kill()  # while it loads it does not listen
            await client.close()
            raise
        client._requests.connect(client._address("requests"))
        client._receiver = asyncio.create_task(client._receive())
        return client

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._child.process.pid

    async def generate(self, request: EngineRequest, patient: bool = False) -> AsyncIterator[RequestDelta]:
        submit, abort = (lambda one: self._send(Submit(one))), (lambda ids: self._send(Abort(ids)))
        async with contextlib.aclosing(self._streams.generate(request, submit, abort, patient)) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        self._send(Abort(request_ids, sequence))

    async def stats(self) -> EngineStats:
        return msgspec.convert(await self.call("stats"), EngineStats)

    async def health(self) -> None:
        self._streams.check()

    async def call(self, method: str, **arguments: object) -> Any:
        self._streams.check()
        self._number += 1
        future = self._calls[self._number] = self._loop.create_future()
        self._send(Call(self._number, method, arguments))
        return await future

    async def close(self) -> None:
        await asyncio.to_thread(self._child.stop)
        self._fail(EngineDeadError("the engine was closed"))
        if self._watcher.is_alive():
            await asyncio.to_thread(self._watcher.join)
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        self._requests.close(linger=0)
        self._answers.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: ToEngine) -> None:
        if not self._requests.closed:
            self._requests.send(encode(message), zmq.NOBLOCK)

    async def _receive(self) -> None:
        while True:
            match decode_from_engine(await self._answers.recv()):
                case Deltas(deltas):
                    self._streams.deliver(deltas)
                case Rejected(request_id, error):
                    self._streams.reject(request_id, error_of(error))
                case Answer(number, value, error):
                    self._answer(number, value, error_of(error) if error is not None else None)

    def _answer(self, number: int, value: Any, error: PagodaError | None) -> None:
        future = self._calls.pop(number, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def _watch(self) -> None:
        try:
            while True:
                kind, value = self._child.connection.recv()
                self._loop.call_soon_threadsafe(self._told, kind, value)
        except (EOFError, OSError, TypeError):
            with contextlib.suppress(RuntimeError):  # our loop may be closed
                self._loop.call_soon_threadsafe(self._fail, self._child.death())

    def _told(self, kind: str, value: Any) -> None:
        if kind == "ready" and not self._ready.done():
            self._ready.set_result(value)
        elif kind == "failed" and not self._ready.done():
            self._ready.set_exception(value)
        elif kind == "dead":
            self._fail(value)

    def _fail(self, error: EngineDeadError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        self._streams.fail(error)
        for number in list(self._calls):
            self._answer(number, None, error)

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"
