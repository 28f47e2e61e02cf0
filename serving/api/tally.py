"""What waits and runs in all API processes of one server: each writes its own row of a shared page, and everybody reads the sums."""

from __future__ import annotations

import mmap
from pathlib import Path
from struct import Struct

COLUMNS = 3
_WIDTH = 8
_ROW = Struct("3q")


class Tally:
    """Queued requests, queued prompt tokens, and requests under way. `path` None: of one process alone."""

    def __init__(self, path: Path | None = None, row: int = 0, rows: int = 1) -> None:
        size = rows * COLUMNS * _WIDTH
        if path is None:
            self._bytes: bytearray | mmap.mmap = bytearray(size)
        else:
            with open(path, "r+b") as file:
                self._bytes = mmap.mmap(file.fileno(), size)
        self._page = memoryview(self._bytes).cast("q")
        self._row = row
        self.clear(row)

    @staticmethod
    def make(path: Path, rows: int) -> None:
        """The page, before anybody opens it."""
        path.write_bytes(bytes(rows * COLUMNS * _WIDTH))

    def write(self, queued: int, tokens: int, running: int) -> None:
        """This process's numbers from now on."""
        _ROW.pack_into(self._bytes, self._row * _ROW.size, queued, tokens, running)

    def clear(self, row: int) -> None:
        """Of a process that is gone."""
        for column in range(COLUMNS):
            self._page[row * COLUMNS + column] = 0

    @property
    def queued(self) -> int:
        return sum(self._page[0::COLUMNS])

    @property
    def tokens(self) -> int:
        return sum(self._page[1::COLUMNS])

    @property
    def running(self) -> int:
        return sum(self._page[2::COLUMNS])
