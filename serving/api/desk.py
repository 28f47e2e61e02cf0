"""What all API processes of a server keep together: each client's requests, and stored responses. It is in the first process; the others
ask it over their pipes (`desk_remote.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from pagoda.hal.errors import RequestError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.key_limits import KeyLimits
from pagoda.serving.api.openai.responses_log import Told
from pagoda.serving.api.openai.responses_replies import ResponseRecord
from pagoda.serving.api.openai.responses_store import ResponseStore, Stored

Names = Collection[str] | None
"""Of requests, by `live_names.names_of`; None: all."""

ABORT_SECONDS = 5.0
"""How long a process is waited for that is asked to end requests."""

CANCEL_SECONDS = 10.0
"""How long the end of a cancelled response is waited for."""


class Desk(Protocol):
    """One process's way to what is shared. `on_cancel`, set by who makes responses here, ends one by its id; `on_abort`, set by who runs
    requests here, ends those of these names and client, and returns the names of those that ran."""

    on_cancel: Callable[[str], None]
    on_abort: Callable[[Names, str], list[str]]

    async def enter(self, client: str) -> None:
        """Count a request in. Raises `RateLimitedError`."""

    def leave(self, client: str) -> None:
        """The end of a request that `enter` let in."""

    async def find(self, owner: str, response_id: str) -> Stored:
        """Raises `NotFoundError` for one that is not kept, and for another key's."""

    async def keep(self, stored: Stored) -> None:
        """A new response; one in the background may be refused: `OverloadedError`, `RateLimitedError`."""

    async def renew(self, stored: Stored) -> None:
        """What has become of one, unless it was deleted meanwhile."""

    def tell(self, response_id: str, events: list[bytes], ended: bool) -> None:
        """Further events of one that streams in the background."""

    async def follow(self, owner: str, response_id: str, place: int) -> Told:
        """Its events from this place on, once there are some. Raises as `find`, and `RequestError` where none are kept."""

    async def forget(self, owner: str, response_id: str) -> Stored:
        """Delete one, and end it where it runs. Raises as `find`."""

    async def cancel(self, owner: str, response_id: str) -> ResponseRecord:
        """End one in the background; returns what it came to. Raises as `find`, and `RequestError` for others."""

    async def abort(self, names: Names, client: str) -> list[str]:
        """End a client's requests in all processes; returns the names of those that ran."""


class SharedDesk:
    """The one that holds everything, for all rows. By row, `tell_cancel`: how a process is told to end a response; `ask_abort`: how it is
    asked to end requests."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = KeyLimits(config.key_max_requests, config.key_requests_per_minute)
        self._store = ResponseStore(config.max_stored_responses)
        self._most_of_key = config.key_max_requests
        self._inside: Counter[tuple[int, str]] = Counter()
        self._ends: dict[str, asyncio.Event] = {}
        self.tell_cancel: dict[int, Callable[[str], None]] = {}
        self.ask_abort: dict[int, Callable[[Names, str], Awaitable[list[str]]]] = {}
        self._aborts: dict[tuple[int, int], asyncio.Future[list[str]]] = {}
        self._numbers = itertools.count()

    def at(self, row: int) -> LocalDesk:
        """The same, as seen from one process."""
        return LocalDesk(self, row)

    def gone(self, row: int) -> None:
        """That process has ended: so have its requests."""
        self.tell_cancel.pop(row, None)
        self.ask_abort.pop(row, None)
        for where, number in list(self._aborts):
            if where == row:
                self.aborted(row, number, [])
        for (where, client), count in list(self._inside.items()):
            for _ in range(count if where == row else 0):
                self.leave(row, client)
        for response_id in self._store.fail_running(row):
            self._end(response_id)

    def enter(self, row: int, client: str) -> None:
        self._limits.enter(client)
        self._inside[row, client] += 1

    def leave(self, row: int, client: str) -> None:
        if self._inside[row, client] <= 1:
            del self._inside[row, client]
        else:
            self._inside[row, client] -= 1
        self._limits.leave(client)

    def find(self, owner: str, response_id: str) -> Stored:
        return self._store.get(owner, response_id)

    def keep(self, row: int, stored: Stored) -> None:
        if stored.running:
            self._store.check_room(stored.owner, self._most_of_key)
        stored.row = row
        self._store.put(stored)

    def renew(self, row: int, stored: Stored) -> None:
        stored.row = row
        self._store.refresh(stored)
        if not stored.running:
            self._end(stored.record.id)

    def tell(self, response_id: str, events: list[bytes], ended: bool) -> None:
        if (log := self._store.log(response_id)) is not None:
            log.add(events, ended)

    async def follow(self, owner: str, response_id: str, place: int) -> Told:
        self._store.get(owner, response_id)
        log = self._store.log(response_id)
        if log is None:
            raise RequestError("only what was made with stream=true and background=true can be streamed again", param="stream")
        return await log.read(place)

    def forget(self, owner: str, response_id: str) -> Stored:
        stored = self._store.get(owner, response_id)
        self._store.forget(response_id)
        if stored.running:
            self._tell(stored)
        return stored

    async def cancel(self, owner: str, response_id: str) -> ResponseRecord:
        stored = self._store.get(owner, response_id)
        if not stored.background:
            raise RequestError("only responses made with background=true can be cancelled; leave the others' streams", param="response_id")
        if stored.running:
            end = self._ends.setdefault(response_id, asyncio.Event())
            self._tell(stored)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), CANCEL_SECONDS)
        return self._store.get(owner, response_id).record

    async def abort(self, names: Names, client: str) -> list[str]:
        found = await asyncio.gather(*(ask(names, client) for ask in [*self.ask_abort.values()]))
        return [*dict.fromkeys(itertools.chain(*found))]

    async def abort_at(self, row: int, tell: Callable[[int], None]) -> list[str]:
        """Tell a process, by a number, to end requests, and wait for it to say `aborted`; what says nothing in time has ended none."""
        key = row, next(self._numbers)
        self._aborts[key] = asyncio.get_running_loop().create_future()
        tell(key[1])
        try:
            return await asyncio.wait_for(self._aborts[key], ABORT_SECONDS)
        except TimeoutError:
            return []
        finally:
            del self._aborts[key]

    def aborted(self, row: int, number: int, found: list[str]) -> None:
        waiting = self._aborts.get((row, number))
        if waiting is not None and not waiting.done():
            waiting.set_result(found)

    def _end(self, response_id: str) -> None:
        if (end := self._ends.pop(response_id, None)) is not None:
            end.set()

    def _tell(self, stored: Stored) -> None:
        if (tell := self.tell_cancel.get(stored.row)) is not None:
            tell(stored.record.id)


class LocalDesk:
    """See `Desk`: in the process that holds it."""

    def __init__(self, shared: SharedDesk, row: int) -> None:
        self._shared, self._row = shared, row

    @property
    def on_cancel(self) -> Callable[[str], None]:
        return self._shared.tell_cancel[self._row]

    @on_cancel.setter
    def on_cancel(self, told: Callable[[str], None]) -> None:
        self._shared.tell_cancel[self._row] = told

    @property
    def on_abort(self) -> Callable[[Names, str], list[str]]:
        return self._on_abort

    @on_abort.setter
    def on_abort(self, told: Callable[[Names, str], list[str]]) -> None:
        async def ask(names: Names, client: str) -> list[str]:
            return told(names, client)

        self._on_abort = told
        self._shared.ask_abort[self._row] = ask

    async def enter(self, client: str) -> None:
        self._shared.enter(self._row, client)

    def leave(self, client: str) -> None:
        self._shared.leave(self._row, client)

    async def find(self, owner: str, response_id: str) -> Stored:
        return self._shared.find(owner, response_id)

    async def keep(self, stored: Stored) -> None:
        self._shared.keep(self._row, stored)

    async def renew(self, stored: Stored) -> None:
        self._shared.renew(self._row, stored)

    def tell(self, response_id: str, events: list[bytes], ended: bool) -> None:
        self._shared.tell(response_id, events, ended)

    async def follow(self, owner: str, response_id: str, place: int) -> Told:
        return await self._shared.follow(owner, response_id, place)

    async def forget(self, owner: str, response_id: str) -> Stored:
        return self._shared.forget(owner, response_id)

    async def cancel(self, owner: str, response_id: str) -> ResponseRecord:
        return await self._shared.cancel(owner, response_id)

    async def abort(self, names: Names, client: str) -> list[str]:
        return await self._shared.abort(names, client)

    def aborted(self, number: int, found: list[str]) -> None:
        """The answer of this process to `SharedDesk.abort_at`."""
        self._shared.aborted(self._row, number, found)
