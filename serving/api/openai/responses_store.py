"""Responses that the server keeps: so many, so many bytes, the longest unused go first, and each is its API key's alone."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
from pagoda.hal.errors import EngineDeadError, NotFoundError
from pagoda.serving.api.errors import OverloadedError, RateLimitedError
from pagoda.serving.api.openai.responses_log import EventLog
from pagoda.serving.api.openai.responses_protocol import Item
from pagoda.serving.api.openai.responses_replies import ResponseRecord, ending_event, failure_of

MAX_BYTES = 256 << 20


@dataclass
class Stored:
    """One of them. `owner`: whose key made it; `given`: the items that it answered; `background`: nobody waits for it, it can be
    cancelled; `streamed`: its events are kept; `running`: it is still being made; `row`: by which API process."""

    owner: str
    record: ResponseRecord
    given: tuple[Item, ...]
    background: bool = False
    streamed: bool = False
    running: bool = False
    row: int = 0
    size: int = field(default=0)

    @property
    def context(self) -> tuple[Item, ...]:
        """What an answer to this response is an answer to."""
        return (*self.given, *self.record.output)

    def measured(self) -> int:
        return len(msgspec.json.encode((self.record, self.given)))


class ResponseStore:
    """Keeps responses by id. Items that several responses share are counted in each, so that memory stays below the bound."""

    def __init__(self, most: int, max_bytes: int = MAX_BYTES) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._logs: dict[str, EventLog] = {}
        self._bytes = 0

    def get(self, owner: str, response_id: str) -> Stored:
        """Raises `NotFoundError` for one that is not kept, and for another key's."""
        stored = self._kept.get(response_id)
        if stored is None or stored.owner != owner:
            raise NotFoundError(
                f"the response {response_id[:100]!r} is not kept here; the server forgets those that were not used for the longest time",
                param="response_id",
            )
        self._kept.move_to_end(response_id)
        return stored

    def put(self, stored: Stored) -> None:
        """Keep a response, or what has become of it."""
        self._remove(stored.record.id)
        if stored.streamed:
            self._logs.setdefault(stored.record.id, EventLog())
        stored.size = stored.measured() + (self._logs[stored.record.id].size if stored.streamed else 0)
        self._kept[stored.record.id] = stored
        self._bytes += stored.size
        for oldest in [one for one in self._kept.values() if not one.running]:
            if len(self._kept) <= self._most and self._bytes <= self._max_bytes:
                return
            self.forget(oldest.record.id)

    def refresh(self, stored: Stored) -> None:
        """What has become of a response, unless it was deleted meanwhile."""
        if stored.record.id in self._kept:
            self.put(stored)

    def log(self, response_id: str) -> EventLog | None:
        """Its events; None where none are kept."""
        return self._logs.get(response_id)

    def forget(self, response_id: str) -> None:
        self._remove(response_id)
        if (log := self._logs.pop(response_id, None)) is not None:
            log.add([])  # its readers look again, and find that it is gone

    def _remove(self, response_id: str) -> None:
        if (gone := self._kept.pop(response_id, None)) is not None:
            self._bytes -= gone.size

    def fail_running(self, row: int) -> list[str]:
        """Those that a process was making which is gone; their ids."""
        lost = [one for one in self._kept.values() if one.running and one.row == row]
        for stored in lost:
            stored.record.status, stored.running = "failed", False
            stored.record.error = failure_of(EngineDeadError("the server's process that made this response has ended"))
            if (log := self.log(stored.record.id)) is not None:
                log.add([ending_event(stored.record, len(log))], ended=True)
            self.put(stored)
        return [stored.record.id for stored in lost]

    def check_room(self, owner: str, most_of_key: int | None) -> None:
        """For one more in the background. Raises where too many run already, of all keys or of this one."""
        running = [one for one in self._kept.values() if one.running]
        if len(running) >= self._most:
            raise OverloadedError(
                f"{len(running)} responses run in the background, which is all that are kept; try again later", asked=1, available=0
            )
        mine = sum(one.owner == owner for one in running)
        if most_of_key is not None and mine >= most_of_key:
            raise RateLimitedError(f"{mine} responses of this key run in the background, which is the limit", retry_after=1)
