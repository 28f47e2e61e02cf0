"""Memory that large prompt steps leave with the allocator: given back once decodes have the device to themselves."""

from __future__ import annotations

from pagoda.hal.device import Device
from pagoda.hal.info import Feature

LARGE = 256
"""Tokens of a step that leaves something worth asking for."""

QUIET = 8
"""Steps without such a step before what it left is given back: the next one must fetch it again, page by page."""


class Leftovers:
    """Watches the steps of one device. Where its memory is not the host's, nobody else wants it, and it is kept."""

    def __init__(self, device: Device) -> None:
        self._memory = device.memory if Feature.UNIFIED_MEMORY in device.info.features else None
        self._quiet: int | None = None

    def after(self, tokens: int) -> None:
        """A step of so many tokens was started."""
        if tokens >= LARGE:
            self._quiet = 0
        elif self._quiet is not None:
            self._quiet += 1
            if self._quiet == QUIET:
                self._quiet = None
                if self._memory is not None:
                    self._memory.trim()
