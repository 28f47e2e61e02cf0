"""The asyncio side of both clients: one queue a live request, filled by what the engine says, ended by its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from pagoda.hal.errors import EngineDeadError, PagodaError, RequestError
from pagoda.serving.engine.messages import EngineRequest, RequestDelta, StepDeltas

Item = RequestDelta | PagodaError


class Streams:
    """All methods run in one asyncio loop."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Item]] = {}
        self._dead: EngineDeadError | None = None

    def check(self) -> None:
        """Raises `EngineDeadError` after the engine's end."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead

    async def generate(
        self, request: EngineRequest, submit: Callable[[EngineRequest], None], abort: Callable[[list[str]], None]
    ) -> AsyncGenerator[RequestDelta, None]:
        """The deltas of one request, from `submit` to its end; leaving early aborts it."""
        self.check()
        if request.request_id in self._queues:
            raise RequestError(f"request_id {request.request_id!r} is already running; live ids must differ", param="request_id")
        queue = self._queues[request.request_id] = asyncio.Queue()
        ended = False
        try:
            submit(request)
            while not ended:
                item = await queue.get()
                ended = isinstance(item, PagodaError) or item.finished
                if isinstance(item, PagodaError):
                    raise item
                yield item
        finally:
            del self._queues[request.request_id]
            if not ended and self._dead is None:
                abort([request.request_id])

    def deliver(self, deltas: StepDeltas) -> None:
        """Hand each request its part; what belongs to streams that were left is dropped."""
        for delta in deltas:
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                queue.put_nowait(delta)

    def reject(self, request_id: str, error: PagodaError) -> None:
        """Its iterator raises the error."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(error)

    def fail(self, error: EngineDeadError) -> None:
        """Every iterator raises, now and later; only the first reason counts."""
        if self._dead is not None:
            return
        self._dead = error
        for queue in self._queues.values():
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(EngineDeadError(str(error)))
