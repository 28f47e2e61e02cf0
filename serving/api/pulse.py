"""Comments in a silent stream (`--sse-keep-alive-interval`), so that proxies and clients which wait so long for a byte keep it open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pagoda.serving.api.outlet import Outlet

PULSE = b": keep-alive\n\n"


class _Silence:
    """Whether nothing went out since `broken` was unset."""

    def __init__(self) -> None:
        self.broken = False

    def breaks(self, event: Callable[..., bytes]) -> Callable[..., bytes]:
        def heard(*new: Any) -> bytes:
            self.broken = True
            return event(*new)

        return heard


async def pulsed(events: AsyncGenerator[bytes, None], seconds: float, outlet: Outlet | None) -> AsyncGenerator[bytes, None]:
    """The events, and a comment whenever none has come for so long, neither here nor through the `outlet` which they lend."""
    silence, begun = _Silence(), False
    async with aclosing(events):
        while True:
            item = asyncio.ensure_future(anext(events))
            try:
                while not item.done():
                    silence.broken = False
                    await asyncio.wait((item,), timeout=seconds)
                    if not (item.done() or silence.broken):
                        yield PULSE
                yield item.result()
            except StopAsyncIteration:
                return
            finally:
                item.cancel()
                await asyncio.gather(item, return_exceptions=True)
            if not begun and outlet is not None:
                begun = True
                outlet.event = silence.breaks(outlet.event)
                outlet.several = silence.breaks(outlet.several) if outlet.several is not None else None
