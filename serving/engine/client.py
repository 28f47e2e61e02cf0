"""How anybody talks to an engine: one protocol, in-process for the SDK and over ZMQ for the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from pagoda.serving.engine.mailbox import Plain
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats, RequestDelta


class EngineClient(Protocol):
    """An engine somewhere. All methods may be called from one asyncio loop; none blocks it."""

    facts: EngineFacts

    def generate(self, request: EngineRequest, patience: int = 1, plain: Plain | None = None) -> AsyncIterator[RequestDelta]:
        """Submit and yield deltas until one is `finished`. Leaving the iterator early aborts the request.

        `patience`: so many tokens of a sequence may be kept until they come together, but for the first delta and before an end.
        `plain`: is offered new tokens, with which nothing else comes, while the caller waits in the iterator: those of the only sequence,
            or a delta.
            Returns True when it has dealt with them; the iterator does not yield them then. It must not wait. What it raises, the
            iterator raises.

        Raises `RequestError` for a request that can never fit (with the number that was too big), `EngineDeadError`
        when the engine ends, also in the middle.
        """
        ...

    async def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        """End requests now, or one sequence of each; unknown ids are ignored. Their iterators get a last delta of it with ABORT."""
        ...

    async def stats(self) -> EngineStats: ...

    async def health(self) -> None:
        """Returns when the engine loop is alive; raises `EngineDeadError` with the reason otherwise."""
        ...

    async def call(self, method: str, **arguments: object) -> object:
        """A control call: "sleep", "wake", "reset_prefix_cache", "start_profile", … Raises `RequestError` for unknown ones."""
        ...

    async def close(self) -> None:
        """Stop the engine and wait for its processes; idempotent."""
        ...
