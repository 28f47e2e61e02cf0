"""The loop's answers on their way to clients in other processes: each client gets what belongs to its requests."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import zmq
from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.engine.messages import StepDeltas
from pagoda.serving.engine.wire import Adapters, Answer, Deltas, FromEngine, Rejected, encode, record

MAIN = ""
"""The client that started the engine."""


class Mouth:
    """One client's messages. They are handed to ZMQ where they are said, from any thread: a thread of their own would have to be woken
    for each, and to wait for its turn beside the loop."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._socket = open_socket(zmq.PUSH)
        self._socket.connect(address)

    def say(self, message: FromEngine) -> None:
        text = encode(message)
        with self._lock:
            if not self._socket.closed:
                self._socket.send(text)

    def close(self) -> None:
        """Nothing follows; what was said still goes out."""
        with self._lock:
            self._socket.close(linger=1000)


class WireSink:
    """See `Sink`. `owners`: whose a live request is, unless it is the main client's."""

    def __init__(self, address: str) -> None:
        self._main = Mouth(address)
        self._others: dict[str, Mouth] = {}
        self._owners: dict[str, str] = {}

    def deltas(self, deltas: StepDeltas) -> None:
        if not self._owners:
            self._main.say(Deltas(deltas))
            return
        for name, part in self._split(deltas).items():
            self._say(name, Deltas(part))

    def rejected(self, request_id: str, error: PagodaError) -> None:
        self._say(self._owners.pop(request_id, MAIN), Rejected(request_id, record(error)))

    def dead(self, error: EngineDeadError) -> None:
        """The pipe to the parent says it, in order with the process's end."""

    def answer(self, name: str, number: int, done: Future[Any]) -> None:
        error = done.exception()
        self._say(name, Answer(number, None, record(error)) if error is not None else Answer(number, done.result()))

    def tell_adapters(self, done: Future[Any]) -> None:
        """To everybody."""
        if done.exception() is None:
            for name in (MAIN, *self._others):
                self._say(name, Adapters(done.result()))

    def own(self, name: str, request_id: str) -> None:
        """A request that is about to be submitted is this client's."""
        if name != MAIN:
            self._owners[request_id] = name

    def join(self, name: str, address: str) -> None:
        self._others[name] = Mouth(address)

    def leave(self, name: str) -> list[str]:
        """Nothing more is sent to this client; the ids of its live requests."""
        mouth = self._others.pop(name, None)
        if mouth is not None:
            mouth.close()
        return [request_id for request_id, owner in list(self._owners.items()) if owner == name]

    def close(self) -> None:
        for mouth in (self._main, *self._others.values()):
            mouth.close()

    def _say(self, name: str, message: FromEngine) -> None:
        mouth = self._main if name == MAIN else self._others.get(name)
        if mouth is not None:
            mouth.say(message)

    def _split(self, deltas: StepDeltas) -> dict[str, StepDeltas]:
        parts: dict[str, StepDeltas] = {}
        owners = self._owners
        for request_id, token in zip(deltas.request_ids, deltas.token_ids, strict=True):
            part = parts.setdefault(owners.get(request_id, MAIN), StepDeltas())
            part.request_ids.append(request_id)
            part.token_ids.append(token)
        for delta in deltas.others:
            owner = owners.pop(delta.request_id, MAIN) if delta.finished else owners.get(delta.request_id, MAIN)
            parts.setdefault(owner, StepDeltas()).others.append(delta)
        return parts


def open_socket(kind: int) -> zmq.Socket[bytes]:
    """Nothing is dropped: the scheduler bounds what is under way."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    return socket
