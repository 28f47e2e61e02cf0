"""A rank's side of a store of pages: whole pages, as they lie in the pool, kept in host memory or in files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch
from pagoda.hal.device import Device
from pagoda.hal.stream import Event, Stream
from pagoda.serving.engine.transfer.catalog import file_of

log = logging.getLogger("pagoda.engine")
CHECK = 16
"""Bytes of the digest of its contents that a file begins with."""


class Shelf(Protocol):
    """Units by key; `pages` are the page ids of each, in all groups. `save` and `place` come in order with the rank's steps."""

    def save(self, keys: Sequence[int | str], pages: Sequence[Sequence[int]]) -> None:
        """Begin to copy pages out; steps after this call may overwrite them."""
        ...

    def keep(self, keys: Sequence[int | str]) -> None:
        """Finish what `save` began. In a thread beside the steps."""
        ...

    def fetch(self, keys: Sequence[int | str]) -> int:
        """Bring units near; how many, from the first, can be placed. In a thread beside the steps."""
        ...

    def place(self, keys: Sequence[int | str], pages: Sequence[Sequence[int]]) -> None:
        """Copy units that were fetched into pages."""
        ...


class HostShelf:
    """One stretch of host memory; a key is a place in it.

    Args:
        pool: `[num_pages, page_bytes]` uint8. units: places. pages_per_unit: of all groups.
    """

    def __init__(self, device: Device, pool: torch.Tensor, units: int, pages_per_unit: int) -> None:
        self._pool, self._width = pool, pages_per_unit
        self._host = device.memory.host((units * pages_per_unit, pool.shape[1]), torch.uint8)

    def save(self, keys: Sequence[int | str], pages: Sequence[Sequence[int]]) -> None:
        taken = self._pool[_ids(pages, self._pool.device)]
        for number, key in enumerate(keys):
            self._of(key).copy_(taken[number * self._width : (number + 1) * self._width], non_blocking=True)

    def keep(self, keys: Sequence[int | str]) -> None: ...

    def fetch(self, keys: Sequence[int | str]) -> int:
        return len(keys)

    def place(self, keys: Sequence[int | str], pages: Sequence[Sequence[int]]) -> None:
        there = self._pool.new_empty((len(keys) * self._width, self._pool.shape[1]))
        for number, key in enumerate(keys):
            there[number * self._width : (number + 1) * self._width].copy_(self._of(key), non_blocking=True)
        self._pool[_ids(pages, self._pool.device)] = there

    def _of(self, key: int | str) -> torch.Tensor:
        first = int(key) * self._width
        return self._host[first : first + self._width]


class DiskShelf:
    """A file a unit, with a digest of its bytes; one that is cut short, changed or missing is not there.

    Args:
        folder: of this rank; made when first written.
    """

    def __init__(self, device: Device, stream: Stream, pool: torch.Tensor, pages_per_unit: int, folder: Path) -> None:
        self._device, self._stream, self._pool, self._width, self._folder = device, stream, pool, pages_per_unit, folder
        self._leaving: dict[int | str, tuple[torch.Tensor, Event]] = {}
        self._arrived: dict[int | str, list[torch.Tensor]] = {}
        self._failed = False

    def save(self, keys: Sequence[int | str], pages: Sequence[Sequence[int]]) -> None:
        taken = self._pool[_ids(pages, self._pool.device)]
        host = self._device.memory.host(tuple(taken.shape), torch.uint8)
        host.copy_(taken, non_blocking=True)
        event = self._stream.record()
        for number, key in enumerate(keys):
            self._leaving[key] = (host[number * self._width : (number + 1) * self._width], event)

    def keep(self, keys: Sequence[int | str]) -> None:
        for key in keys:
            unit, event = self._leaving.pop(key)
            event.wait()
            try:
                self._write(self._folder / file_of(str(key)), unit.numpy().tobytes())
            except OSError as error:
                self._tell(f"KV pages are not kept on disk: {error}")

    def fetch(self, keys: Sequence[int | str]) -> int:
        for count, key in enumerate(keys):
            try:
                content = (self._folder / file_of(str(key))).read_bytes()
            except OSError as error:
                self._tell(f"KV pages cannot be read from disk and are computed again: {error}")
                return count
            head, body = content[:CHECK], content[CHECK:]
            if len(body) != self._width * self._pool.shape[1] or blake2b(body, digest_size=CHECK).digest() != head:
                self._tell(f"{self._folder / file_of(str(key))} is damaged: its tokens are computed again")
                return count
            unit = torch.frombuffer(bytearray(body), dtype=torch.uint8).view(self._width, -1)
            self._arrived.setdefault(key, []).append(unit)  # two requests may wait for the same one
        return len(keys)

    def place(self, keys: Sequence[int | str], pages: Sequence[Sequence[int]]) -> None:
        units = torch.cat([self._take(key) for key in keys])
        self._pool[_ids(pages, self._pool.device)] = units.to(self._pool.device)

    def _take(self, key: int | str) -> torch.Tensor:
        units = self._arrived[key]
        unit = units.pop()
        if not units:
            del self._arrived[key]
        return unit

    def _write(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(blake2b(content, digest_size=CHECK).digest() + content)
        part.replace(path)

    def _tell(self, message: str) -> None:
        if not self._failed:
            log.warning("%s (said once)", message)
        self._failed = True


def _ids(pages: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor([page for unit in pages for page in unit], dtype=torch.int64).to(device)
