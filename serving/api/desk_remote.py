"""The desk as a further API process reaches it: questions on the pipe to the first process, answered in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.api.desk import LocalDesk, Names
from pagoda.serving.api.openai.responses_log import Told
from pagoda.serving.api.openai.responses_replies import ResponseRecord
from pagoda.serving.api.openai.responses_store import Stored


class Asked(NamedTuple):
    """A method of `Desk` with its arguments; the answer has the same number. None: nobody waits for it."""

    number: int | None
    method: str
    arguments: tuple[Any, ...]


class Answered(NamedTuple):
    """What it gave, or the error that it raised."""

    number: int
    value: Any
    error: Exception | None = None


class Cancel(NamedTuple):
    """To the process that makes this response: end it."""

    response_id: str


class Abort(NamedTuple):
    """To a process: end this client's requests of these names, and say with the number which ran."""

    number: int
    names: Names
    client: str


class RemoteDesk:
    """See `Desk`. All methods run in one asyncio loop."""

    def __init__(self, send: Callable[[Asked], None]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self.on_cancel: Callable[[str], None] = lambda response_id: None
        self.on_abort: Callable[[Names, str], list[str]] = lambda names, client: []

    def told(self, message: Answered | Cancel | Abort) -> None:
        """From the first process."""
        if isinstance(message, Abort):
            return self._send(Asked(None, "aborted", (message.number, self.on_abort(message.names, message.client))))
        if isinstance(message, Cancel):
            return self.on_cancel(message.response_id)
        future = self._waiting.pop(message.number, None)
        if future is None or future.done():
            return
        future.set_result(message.value) if message.error is None else future.set_exception(message.error)

    async def enter(self, client: str) -> None:
        asked = asyncio.ensure_future(self._ask("enter", client))
        try:
            await asyncio.shield(asked)
        except asyncio.CancelledError:  # who has left meanwhile may have been counted
            asked.add_done_callback(lambda done: self.leave(client) if not done.cancelled() and done.exception() is None else None)
            raise

    def leave(self, client: str) -> None:
        self._send(Asked(None, "leave", (client,)))

    async def find(self, owner: str, response_id: str) -> Stored:
        return await self._ask("find", owner, response_id)

    async def keep(self, stored: Stored) -> None:
        await self._ask("keep", stored)

    async def renew(self, stored: Stored) -> None:
        await self._ask("renew", stored)

    def tell(self, response_id: str, events: list[bytes], ended: bool) -> None:
        self._send(Asked(None, "tell", (response_id, events, ended)))

    async def follow(self, owner: str, response_id: str, place: int) -> Told:
        return await self._ask("follow", owner, response_id, place)

    async def forget(self, owner: str, response_id: str) -> Stored:
        return await self._ask("forget", owner, response_id)

    async def cancel(self, owner: str, response_id: str) -> ResponseRecord:
        return await self._ask("cancel", owner, response_id)

    async def abort(self, names: Names, client: str) -> list[str]:
        return await self._ask("abort", names, client)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        self._number += 1
        future = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._send(Asked(self._number, method, arguments))
        return await future


async def answer(desk: LocalDesk, asked: Asked, send: Callable[[Answered], None]) -> None:
    """In the first process: do what another one asks."""
    if asked.number is None:
        return getattr(desk, asked.method)(*asked.arguments)  # type: ignore[no-any-return]
    try:
        value = await getattr(desk, asked.method)(*asked.arguments)
    except PagodaError as error:
        send(Answered(asked.number, None, error))
    except Exception as error:
        send(Answered(asked.number, None, EngineDeadError(f"the server's first process failed: {error!r}")))
    else:
        send(Answered(asked.number, value))
