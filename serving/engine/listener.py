"""What clients send to an engine's process: a thread a client, which hands it to the loop."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.core import EngineCore
from pagoda.serving.engine.wire import Abort, Call, Join, Leave, Submit, ToEngine, decode_plain, decode_to_engine, encode
from pagoda.serving.engine.wire_sink import WireSink, open_socket

log = logging.getLogger("pagoda.engine")
_OF_ADAPTERS = ("load_adapter", "unload_adapter")


class Listener:
    """Of the client `name`. The main one lets others join."""

    def __init__(self, core: EngineCore, sink: WireSink, name: str) -> None:
        self._core, self._sink, self._name = core, sink, name
        self._guests: dict[str, str] = {}

    def start(self, address: str) -> None:
        socket = open_socket(zmq.PULL)
        socket.bind(address)
        threading.Thread(target=self._listen, args=(socket,), name="requests", daemon=True).start()

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            match self._read(socket.recv()):
                case None:
                    continue
                case Submit(request):
                    self._sink.own(self._name, request.request_id)
                    self._core.submit(request)
                case Abort(request_ids, sequence):
                    self._core.abort(request_ids, sequence)
                case Call(number, method, arguments):
                    self._call(number, method, arguments)
                case Join(name, requests, answers):
                    self._join(name, requests, answers)
                case Leave(name) if name == self._name:
                    socket.close(linger=0)
                    return
                case Leave(name):
                    self._leave(name)

    def _read(self, message: bytes) -> ToEngine | None:
        try:
            return decode_to_engine(message)
        except Exception as error:  # what one client sent must not make the engine deaf to all
            log.error("a message of %d bytes cannot be read: %s", len(message), error)
            self._refuse(message, error)
            return None

    def _refuse(self, message: bytes, error: Exception) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            match decode_plain(message):
                case [_, {"request_id": str(request_id)}]:
                    self._sink.own(self._name, request_id)
                    self._sink.rejected(request_id, RequestError(f"the engine cannot read this request: {error}"))

    def _call(self, number: int, method: str, arguments: dict[str, Any]) -> None:
        def done(future: Future[Any]) -> None:
            self._sink.answer(self._name, number, future)
            if method in _OF_ADAPTERS and future.exception() is None:
                self._tell_adapters()

        self._core.call(method, arguments).add_done_callback(done)

    def _tell_adapters(self) -> None:
        self._core.call("adapters", {}).add_done_callback(self._sink.tell_adapters)

    def _join(self, name: str, requests: str, answers: str) -> None:
        self._guests[name] = requests
        self._sink.join(name, answers)
        Listener(self._core, self._sink, name).start(requests)
        self._tell_adapters()

    def _leave(self, name: str) -> None:
        address = self._guests.pop(name, None)
        if address is None:
            return
        with open_socket(zmq.PUSH) as socket:  # only its own thread may touch a socket
            socket.connect(address)
            socket.send(encode(Leave(name)))
        self._core.abort(self._sink.leave(name))
