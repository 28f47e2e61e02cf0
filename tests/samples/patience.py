"""Waiting for what another thread or process does: until it has happened, with a limit that only a test that fails reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 120.0
"""Machines may be slow, busy, or stopped for seconds: how long something takes proves nothing."""


def until(condition: Callable[[], object], what: str = "") -> None:
    """Look again and again until it holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain {what}"
        time.sleep(0.01)


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """The same beside an event loop that goes on."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain {what}"
        await asyncio.sleep(0.005)
