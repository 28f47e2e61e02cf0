"""Events of a response that streams in the background: kept in their order, so that any number of readers follow from any place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

PATIENCE = 20.0
"""Seconds after which a reader hears that there is nothing new."""
MOST = 256
"""Events that a reader gets at once."""


class Told(NamedTuple):
    """Encoded events from the place on that was asked for. `ended`: none follows them."""

    events: list[bytes]
    ended: bool


class EventLog:
    """Of one response. `size`: bytes."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()
        self.size = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, events: Sequence[bytes], ended: bool = False) -> None:
        """Whatever comes after an end is left out."""
        if self._ended:
            return
        self._events += events
        self._ended = ended
        self.size += sum(map(len, events))
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, place: int) -> Told:
        """Waits for the first of them, for a while."""
        if place >= len(self._events) and not self._ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), PATIENCE)
        events = self._events[place : place + MOST]
        return Told(events, self._ended and place + len(events) >= len(self._events))
