"""One rank's adapters: read and checked into host memory when they are loaded, copied into a device slot before a step that needs them."""

from __future__ import annotations

from collections.abc import Callable

from pagoda.hal.errors import PagodaError
from pagoda.models.adapters.peft import Adapter
from pagoda.models.adapters.slots import AdapterSlots
from pagoda.serving.engine.plan import Placement

AdapterReader = Callable[[str], Adapter]
"""Reads the adapter of a folder for this rank; raises `PagodaError`s."""


class AdapterStore:
    """Adapters by number."""

    def __init__(self, read: AdapterReader) -> None:
        self._read = read
        self._held: dict[int, Adapter] = {}

    def load(self, number: int, path: str) -> tuple[str, int] | PagodaError:
        """Digest and rank of what was read; an adapter that does not fit is answered, not raised: it harms nobody else."""
        try:
            adapter = self._held[number] = self._read(path)
        except PagodaError as error:
            return error
        return adapter.digest, adapter.rank

    def drop(self, number: int) -> None:
        self._held.pop(number, None)

    def place(self, slots: AdapterSlots, placement: Placement) -> None:
        slots.place(placement.slot, self._held[placement.adapter].factors)
