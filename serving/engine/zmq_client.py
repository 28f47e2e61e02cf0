"""The engine in a process of its own: the client that starts it, and lets clients in further processes join."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine.child import Child, engine_child
from pagoda.serving.engine.inprocess_client import EngineStarter
from pagoda.serving.engine.logs import settings_here
from pagoda.serving.engine.messages import EngineFacts
from pagoda.serving.engine.wire import Join, Leave
from pagoda.serving.engine.wire_client import WireClient


class ZmqClient(WireClient):
    """See `EngineClient`. Made by `await ZmqClient.start(starter)` in the loop that will use it."""

    def __init__(self, child: Child | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pagoda-"))
        super().__init__(self.folder)
        self._ready: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._child = child or engine_child()
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    @classmethod
    async def start(cls, starter: EngineStarter, child: Child | None = None) -> ZmqClient:
        """Start the process, unless `child` is there already, and wait until it has loaded. Raises the error that loading raised there."""
        client = cls(child)
        client._child.connection.send((starter, client.requests_address, client.answers_address, settings_here()))
        client._watcher.start()
        try:
            facts = await client._ready
        except BaseException:
            client._child.process.kill()  # while it loads it does not listen
            await client.close()
            raise
        client.connect(facts)
        return client

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._child.process.pid

    def admit(self, name: str) -> None:
        """Let `WireClient(folder, name)` in another process join; names are never used twice."""
        requests, answers = (f"ipc://{self.folder / (kind + name)}" for kind in ("requests", "answers"))
        self.send(Join(name, requests, answers))

    def dismiss(self, name: str) -> None:
        """That process is gone: its requests end in the engine."""
        self.send(Leave(name))

    async def close(self) -> None:
        await asyncio.to_thread(self._child.stop)
        self.fail(EngineDeadError("the engine was closed"))
        if self._watcher.is_alive():
            await asyncio.to_thread(self._watcher.join)
        await super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def fail(self, error: EngineDeadError) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        super().fail(error)

    def _watch(self) -> None:
        try:
            while True:
                kind, value = self._child.connection.recv()
                self._loop.call_soon_threadsafe(self._told, kind, value)
        except (EOFError, OSError, TypeError):
            with contextlib.suppress(RuntimeError):  # our loop may be closed
                self._loop.call_soon_threadsafe(self.fail, self._child.death())

    def _told(self, kind: str, value: Any) -> None:
        if kind == "ready" and not self._ready.done():
            self._ready.set_result(value)
        elif kind == "failed" and not self._ready.done():
            self._ready.set_exception(value)
        elif kind == "dead":
            self.fail(value)
