"""What all API processes of a server keep together: each client's requests, and stored responses. It is in the first process; the others
ask it over their pipes (`desk_remote.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pagoda.hal.errors import RequestError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.key_limits import KeyLimits
from pagoda.serving.api.openai.responses_replies import ResponseRecord
from pagoda.serving.api.openai.responses_store import ResponseStore, Stored

CANCEL_SECONDS = 10.0
"""How long the end of a cancelled response is waited for."""


class Desk(Protocol):
    """One process's way to what is shared. `on_cancel`, set by who makes responses here, ends one by its id."""

    on_cancel: Callable[[str], None]

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

    async def forget(self, owner: str, response_id: str) -> Stored:
        """Delete one, and end it where it runs. Raises as `find`."""

    async def cancel(self, owner: str, response_id: str) -> ResponseRecord:
        """End one in the background; returns what it came to. Raises as `find`, and `RequestError` for others."""


class SharedDesk:
    """The one that holds everything, for all rows. `tell_cancel`: by row, how a process is told to end a response."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = KeyLimits(config.key_max_requests, config.key_requests_per_minute)
        self._store = ResponseStore(config.max_stored_responses)
        self._most_of_key = config.key_max_requests
        self._inside: Counter[tuple[int, str]] = Counter()
        self._ends: dict[str, asyncio.Event] = {}
        self.tell_cancel: dict[int, Callable[[str], None]] = {}

    def at(self, row: int) -> LocalDesk:
        """The same, as seen from one process."""
        return LocalDesk(self, row)

    def gone(self, row: int) -> None:
        """That process has ended: so have its requests."""
        self.tell_cancel.pop(row, None)
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

    async def forget(self, owner: str, response_id: str) -> Stored:
        return self._shared.forget(owner, response_id)

    async def cancel(self, owner: str, response_id: str) -> ResponseRecord:
        return await self._shared.cancel(owner, response_id)
