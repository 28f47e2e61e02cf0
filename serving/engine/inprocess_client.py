"""The engine in this process: its loop in a thread, its client in the caller's asyncio loop. What the SDK uses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.engine.core import EngineCore, Sink
from pagoda.serving.engine.executor import Executor
from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats, RequestDelta, StepDeltas
from pagoda.serving.engine.streams import Streams


class Engine(NamedTuple):
    """A loaded engine: its loop, not running yet, and its ranks."""

    core: EngineCore
    executor: Executor


EngineStarter = Callable[[Sink], Engine]
"""Loads an engine that answers into the sink; `build.engine_starter(config)` makes one. Picklable where it crosses to a process."""


class InProcessClient:
    """See `EngineClient`. Made by `await InProcessClient.start(starter)` in the loop that will use it."""

    facts: EngineFacts

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams = Streams()
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    async def start(cls, starter: EngineStarter) -> InProcessClient:
        """Load the engine in a thread, so that the loop goes on. Raises what loading raises."""
        client = cls(asyncio.get_running_loop())
        engine = await asyncio.to_thread(_started, starter, _LoopSink(client._loop, client._streams))
        client._engine, client.facts = engine, engine.core.facts
        client._thread = threading.Thread(target=client._run, name="engine", daemon=True)
        client._thread.start()
        return client

    async def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        core = self._core()
        async with contextlib.aclosing(self._streams.generate(request, core.submit, core.abort, patience, plain)) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        self._core().abort(request_ids, sequence)

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self.call("stats")
        return stats

    async def health(self) -> None:
        self._streams.check()
        self._core().health()

    async def call(self, method: str, **arguments: object) -> Any:
        return await asyncio.wrap_future(self._core().call(method, arguments))

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._core().stop()
            while thread.is_alive():  # not to_thread: at interpreter exit executors take no more work
                await asyncio.sleep(0.002)
            self._streams.fail(EngineDeadError("the engine was closed"))

    def _core(self) -> EngineCore:
        assert self._engine is not None, "use InProcessClient.start"
        return self._engine.core

    def _run(self) -> None:
        assert self._engine is not None
        try:
            with contextlib.suppress(EngineDeadError):  # the streams were told
                self._engine.core.run()
        finally:
            self._engine.executor.stop()


def _started(starter: EngineStarter, sink: Sink) -> Engine:
    """A future takes no StopIteration: who waits for one that ends by it waits for ever."""
    try:
        return starter(sink)
    except StopIteration as error:
        raise RuntimeError("an iterator that gave nothing ended the engine's start") from error


class _LoopSink:
    """Takes the loop's answers across threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, streams: Streams) -> None:
        self._loop, self._streams = loop, streams

    def deltas(self, deltas: StepDeltas) -> None:
        self._call(self._streams.deliver, deltas)

    def rejected(self, request_id: str, error: PagodaError) -> None:
        self._call(self._streams.reject, request_id, error)

    def dead(self, error: EngineDeadError) -> None:
        self._call(self._streams.fail, error)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop was closed before its engine
            self._loop.call_soon_threadsafe(method, *arguments)
