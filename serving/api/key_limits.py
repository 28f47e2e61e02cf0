"""Limits for each client: how many requests at once, and how many a minute. A client is its API key, or its address without keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pagoda.serving.api.errors import RateLimitedError

MAX_CLIENTS = 100_000
"""Idle clients beyond this many are forgotten, so that addresses do not pile up."""


@dataclass
class _Client:
    """allowance: requests that may come at once, refilled over a minute; at: when it was last counted; running: requests under way."""

    allowance: float
    at: float
    running: int = field(default=0)


class KeyLimits:
    """Counts each client's requests. None is no limit."""

    def __init__(self, at_once: int | None, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_once, self._per_minute, self._clock = at_once, per_minute, clock
        self._clients: dict[str, _Client] = {}

    def enter(self, name: str) -> None:
        """Count one request in. Raises `RateLimitedError`, which says when to come again."""
        now = self._clock()
        client = self._clients.pop(name, None) or _Client(float(self._per_minute or 0), now)
        self._clients[name] = client
        self._forget()
        if self._at_once is not None and client.running >= self._at_once:
            raise RateLimitedError(
                f"{client.running} requests of this key are under way, which is the limit; try again when one has ended", retry_after=1
            )
        if self._per_minute is not None:
            client.allowance = min(self._per_minute, client.allowance + (now - client.at) * self._per_minute / 60)
            client.at = now
            if client.allowance < 1:
                wait = math.ceil((1 - client.allowance) * 60 / self._per_minute)
                raise RateLimitedError(f"this key may send {self._per_minute} requests a minute; try again in {wait} s", retry_after=wait)
            client.allowance -= 1
        client.running += 1

    def leave(self, name: str) -> None:
        """The end of a request that `enter` let in."""
        if (client := self._clients.get(name)) is not None:
            client.running -= 1

    def _forget(self) -> None:
        if len(self._clients) > MAX_CLIENTS:
            oldest = next(name for name, client in self._clients.items() if not client.running)
            del self._clients[oldest]
