"""The engine process: loads an engine, tells its facts or its error, then serves one client over ZMQ until either ends."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import zmq
from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.engine.child import Inbox, Outbox, portable
from pagoda.serving.engine.core import EngineCore
from pagoda.serving.engine.inprocess_client import Engine
from pagoda.serving.engine.messages import StepDeltas
from pagoda.serving.engine.wire import Abort, Answer, Call, Deltas, FromEngine, Rejected, Submit, decode_to_engine, encode, record


class WireSink:
    """The loop's answers, encoded and sent by a thread of their own."""

    def __init__(self, address: str) -> None:
        self._queue: SimpleQueue[FromEngine | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, args=(address,), name="deltas", daemon=True)
        self._thread.start()

    def deltas(self, deltas: StepDeltas) -> None:
        self._queue.put(Deltas(deltas))

    def rejected(self, request_id: str, error: PagodaError) -> None:
        self._queue.put(Rejected(request_id, record(error)))

    def dead(self, error: EngineDeadError) -> None:
        """The pipe to the parent says it, in order with the process's end."""

    def answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        self._queue.put(Answer(number, None, record(error)) if error is not None else Answer(number, done.result()))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _send(self, address: str) -> None:
        socket = _socket(zmq.PUSH)
        socket.connect(address)
        while (message := self._queue.get()) is not None:
            socket.send(encode(message))
        socket.close(linger=1000)


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """Messages on the pipe: (starter, request address, delta address) in; ("ready", facts), ("failed", error), ("dead", error) out."""
    told = inbox.get()
    if told is None:  # the parent changed its mind
        return 0
    starter, requests, answers = told
    sink = WireSink(answers)
    try:
        engine: Engine = starter(sink)
    except BaseException as error:
        outbox.send(("failed", portable(error, "the engine")))
        return 1
    socket = _socket(zmq.PULL)
    socket.bind(requests)
    threading.Thread(target=_listen, args=(socket, engine.core, sink), name="requests", daemon=True).start()
    threading.Thread(target=_stop_when_asked, args=(inbox, engine.core), name="stop", daemon=True).start()
    outbox.send(("ready", engine.core.facts))
    try:
        engine.core.run()
    except EngineDeadError as error:
        print(f"engine: {error}", file=sys.stderr, flush=True)
        outbox.send(("dead", error))
        return 1
    finally:
        engine.executor.stop()
        sink.close()
    return 0


def _listen(socket: zmq.Socket[bytes], core: EngineCore, sink: WireSink) -> None:
    while True:
        match decode_to_engine(socket.recv()):
            case Submit(request):
                core.submit(request)
            case Abort(request_ids, sequence):
                core.abort(request_ids, sequence)
            case Call(number, method, arguments):
                core.call(method, arguments).add_done_callback(lambda done, number=number: sink.answer(number, done))  # type: ignore[misc]


def _stop_when_asked(inbox: Inbox, core: EngineCore) -> None:
    while inbox.get() is not None:
        pass
    core.stop()


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)  # nothing is dropped: the scheduler bounds what is under way
    return socket
