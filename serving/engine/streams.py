"""The asyncio side of both clients: one mailbox a live request, filled by what the engine says, ended by its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from pagoda.hal.errors import EngineDeadError, PagodaError, RequestError
from pagoda.serving.engine.mailbox import Mailbox, Plain
from pagoda.serving.engine.messages import EngineRequest, RequestDelta, StepDeltas


class Streams:
    """All methods run in one asyncio loop."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}
        self._dead: EngineDeadError | None = None

    def check(self) -> None:
        """Raises `EngineDeadError` after the engine's end."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead

    async def generate(
        self,
        request: EngineRequest,
        submit: Callable[[EngineRequest], None],
        abort: Callable[[list[str]], None],
        patience: int = 1,
        plain: Plain | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """The deltas of one request, from `submit` to its end; leaving early aborts it. `patience`, `plain`: see `EngineClient`."""
        self.check()
        if request.request_id in self._boxes:
            raise RequestError(f"request_id {request.request_id!r} is already running; live ids must differ", param="request_id")
        box = self._boxes[request.request_id] = Mailbox(request.request_id, patience, plain)
        ended = False
        try:
            submit(request)
            while not ended:
                delta = await box.take()
                ended = delta.finished
                yield delta
        except PagodaError:
            ended = True
            raise
        finally:
            del self._boxes[request.request_id]
            if not ended and self._dead is None:
                abort([request.request_id])

    def deliver(self, *steps: StepDeltas) -> None:
        """Hand each request its part of all the steps together; what belongs to streams that were left is dropped."""
        boxes = self._boxes
        told: dict[Mailbox, None] = {}
        for deltas in steps:
            for request_id, token in zip(deltas.request_ids, deltas.token_ids):
                if (box := boxes.get(request_id)) is not None:
                    box.add_token(token)
                    told[box] = None
            for delta in deltas.others:
                if (box := boxes.get(delta.request_id)) is not None:
                    box.add(delta)
                    told[box] = None
        for box in told:
            box.settle()

    def reject(self, request_id: str, error: PagodaError) -> None:
        """Its iterator raises the error."""
        if request_id in self._boxes:
            self._boxes[request_id].fail(error)

    def fail(self, error: EngineDeadError) -> None:
        """Every iterator raises, now and later; only the first reason counts."""
        if self._dead is not None:
            return
        self._dead = error
        for box in self._boxes.values():
            box.fail(EngineDeadError(str(error)))
