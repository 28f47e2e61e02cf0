"""The further API processes of a server, as its first one sees them: started, replaced when they die, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.desk import Names, SharedDesk
from pagoda.serving.api.desk_remote import Abort, Asked, Cancel, answer
from pagoda.serving.api.front import Engine, Orders
from pagoda.serving.api.service import ModelCard
from pagoda.serving.api.tally import Tally
from pagoda.serving.engine.child import Child
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.zmq_client import ZmqClient

log = logging.getLogger("pagoda.api")
SHORT_LIFE = 10.0
"""Seconds; one that lives no longer than this is not replaced: the next would not, either."""


class Front:
    """One process. `ready` is done when it listens, or has failed to."""

    def __init__(self, orders: Orders, number: int) -> None:
        self.row, self.name, self.began = orders.row, f"-{number}", time.monotonic()
        target = "pagoda.serving.api.front:serve"
        self.child = Child(target, f"API process {orders.row}", (target.partition(":")[0],), descriptors=(orders.listener,))
        self.child.connection.send(orders)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self.child.connection.send(message)


class Fronts:
    """Rows 1 and up of the tally; row 0 is the first process's own."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, card: ModelCard, sock: socket.socket, settings: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pagoda-api-"))
        self._rows = server.api_server_count
        path = self._folder / "tally"
        Tally.make(path, self._rows)
        self.tally = Tally(path, 0, self._rows)
        self.desk = SharedDesk(server)
        self._orders = Orders(engine, server, card, sock.fileno(), path, 0, self._rows, settings)
        self._loop = asyncio.get_running_loop()
        self._client: ZmqClient | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._born = 0
        self._stopping = False
        self._fronts = [self._start(row) for row in range(1, self._rows)]

    async def join(self, client: ZmqClient) -> None:
        """The engine has loaded; returns when all listen. Raises `PagodaError` when one does not come up."""
        self._client = client
        for front in self._fronts:
            self._admit(front)
        await asyncio.gather(*(front.ready for front in self._fronts))

    def stop(self) -> None:
        """Ask them to drain; asked again, to hurry."""
        self._stopping = True
        for front in self._fronts:
            front.tell(None)

    def engine_died(self, reason: str) -> None:
        self._stopping = True
        for front in self._fronts:
            front.tell(EngineDeadError(reason))

    async def close(self, timeout: float) -> None:
        """Returns when none is left; those that do not end in time are killed."""
        if not self._stopping:
            self.stop()
        end = time.monotonic() + timeout
        while any(front.child.process.poll() is None for front in self._fronts) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for front in self._fronts:
            await asyncio.to_thread(front.child.kill)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, row: int) -> Front:
        self._born += 1
        front = Front(replace(self._orders, row=row), self._born)
        self.desk.tell_cancel[row] = lambda response_id: front.tell(Cancel(response_id))
        threading.Thread(target=self._watch, args=(front,), name=f"api-watch-{row}", daemon=True).start()
        return front

    def _admit(self, front: Front) -> None:
        assert self._client is not None
        self._client.admit(front.name)
        front.tell(Engine(self._client.facts, self._client.folder, front.name))

    def _watch(self, front: Front) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                while (message := front.child.connection.recv()) is not None:
                    self._loop.call_soon_threadsafe(self._told, front, message)
            except (EOFError, OSError, TypeError):
                self._loop.call_soon_threadsafe(self._died, front)

    def _told(self, front: Front, message: Any) -> None:
        if not isinstance(message, Asked):
            self.desk.ask_abort[front.row] = partial(self._abort_at, front)
            return _done(front.ready)
        self._answers.add(task := asyncio.ensure_future(answer(self.desk.at(front.row), message, front.tell)))
        task.add_done_callback(self._answers.discard)

    def _abort_at(self, front: Front, names: Names, client: str) -> Awaitable[list[str]]:
        return self.desk.abort_at(front.row, lambda number: front.tell(Abort(number, names, client)))

    def _died(self, front: Front) -> None:
        if not front.ready.done():
            front.ready.set_exception(PagodaError(f"{front.child.name} did not start; its lines on standard error say why"))
        self.tally.clear(front.row)
        self.desk.gone(front.row)
        if self._client is not None:
            self._client.dismiss(front.name)
        if self._stopping:
            return
        self._fronts.remove(front)
        log.error("%s; its requests were aborted in the engine", front.child.death())
        if time.monotonic() - front.began < SHORT_LIFE:
            log.error("API process %d ended right after its start and is not replaced: %d serve on", front.row, len(self._fronts) + 1)
            return
        self._fronts.append(new := self._start(front.row))
        self._admit(new)


def _done(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
