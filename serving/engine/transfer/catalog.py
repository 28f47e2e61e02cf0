"""Which units a store has and under which key the ranks keep each: places of host memory, or names of files."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Protocol

Key = int | str


class Catalog(Protocol):
    """Used in the engine's loop alone. A unit that is held is not given up."""

    def find(self, digest: bytes) -> Key | None:
        """The key of a unit that is there."""
        ...

    def add(self, digest: bytes) -> Key | None:
        """A key for a unit that will be kept now; None where it is there already or has no room."""
        ...

    def hold(self, digest: bytes) -> None: ...

    def let_go(self, digest: bytes) -> None: ...


class HostCatalog:
    """`places` units of host memory; the least recently used one that is not held goes first."""

    def __init__(self, places: int) -> None:
        self._free = list(range(places - 1, -1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._held: Counter[bytes] = Counter()

    def find(self, digest: bytes) -> int | None:
        return self._places.get(digest)

    def add(self, digest: bytes) -> int | None:
        if digest in self._places:
            self._places.move_to_end(digest)
            return None
        if not self._free and not self._evict():
            return None
        self._places[digest] = self._free.pop()
        return self._places[digest]

    def hold(self, digest: bytes) -> None:
        self._held[digest] += 1
        self._places.move_to_end(digest)

    def let_go(self, digest: bytes) -> None:
        self._held[digest] -= 1
        if not self._held[digest]:
            del self._held[digest]

    def _evict(self) -> bool:
        oldest = next((digest for digest in self._places if digest not in self._held), None)
        if oldest is not None:
            self._free.append(self._places.pop(oldest))
        return oldest is not None


class DiskCatalog:
    """Files of rank 0 under `folder`, named by digest; nothing is given up. Other engines may write there too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[bytes] = set()

    def find(self, digest: bytes) -> str | None:
        if digest not in self._known and not (self._folder / file_of(digest.hex())).exists():
            return None
        self._known.add(digest)
        return digest.hex()

    def add(self, digest: bytes) -> str | None:
        if self.find(digest) is not None:
            return None
        self._known.add(digest)
        return digest.hex()

    def hold(self, digest: bytes) -> None: ...

    def let_go(self, digest: bytes) -> None:
        self._known.discard(digest)  # a file that could not be read is looked for again


def file_of(name: str) -> str:
    """Where a unit's file is in its rank's folder."""
    return f"{name[:2]}/{name}.kv"
