"""The head of a GGUF file: its metadata, and the entries of its tensors. Needs no torch, so that text-only processes can read it."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pagoda.hal.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types → struct codes."""
STRING, ARRAY = 8, 9


class Entry(NamedTuple):
    """A tensor's line in the directory: shape outermost first, `code` of its ggml type, `offset` from the start of the data."""

    name: str
    shape: tuple[int, ...]
    code: int
    offset: int


class GgufHead:
    """What a GGUF file says before its numbers.

    Attributes:
        metadata: values by key: numbers, bools, strings, lists of them.
        entries: its tensors, in file order.
        start: byte where the data begins, a multiple of `alignment`, as every tensor. size: bytes of the file.

    Raises `CheckpointError` where the head is truncated, corrupt, or of another byte order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _map_head(path) as data:
            head = _Cursor(path, data)
            tensor_count, value_count = _preamble(head)
            self.metadata: Mapping[str, Any] = _read_metadata(head, value_count)
            self.entries = tuple(_read_entry(head) for _ in range(tensor_count))
            self.alignment = self._alignment()
            self.start = _aligned(head.position, self.alignment)
            self.size = len(data)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two")
        return alignment


class _Cursor:
    """Reads little-endian values one after the other; running past the end is a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path}: the header needs byte {end}, the file ends at {len(self.data)}; it is truncated or corrupt, fetch it again"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str, count: int = 1) -> tuple[Any, ...]:
        taken = self.take(struct.calcsize(f"<{code}") * count)  # before a count that no file holds becomes a layout
        return struct.unpack(f"<{count}{code}", taken)

    def text(self) -> str:
        # Some vocabularies hold pieces that are no UTF-8.
        return self.take(self.number("Q")[0]).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array(*self.number("I"), *self.number("Q"))
        return self.number(self._code(kind))[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return self._texts(count)
        if kind == ARRAY:
            return [self.value(kind) for _ in range(count)]
        return list(self.number(self._code(kind), count))

    def _texts(self, count: int) -> list[str]:
        # A vocabulary has 10⁵ of these and a start waits for it: no call per string.
        data, position, size, texts = self.data, self.position, len(self.data), []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(data[position:start], "little")
            if start > size or position > size:
                self.position = size
                self.take(1)
            texts.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return texts

    def _code(self, kind: int) -> str:
        if kind not in SCALARS:
            raise CheckpointError(
                f"{self.path}: metadata value of unknown type {kind} at byte {self.position}; the file is corrupt or newer"
            )
        return SCALARS[kind]


def _map_head(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is empty, expected a GGUF file") from None


def _preamble(head: _Cursor) -> tuple[int, int]:
    magic = head.take(4)
    if magic != MAGIC:
        raise CheckpointError(f"{head.path} begins with {magic!r}, a GGUF file begins with {MAGIC!r}")
    (version,) = head.number("I")
    if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise CheckpointError(f"{head.path} is big-endian; Pagoda reads little-endian files, convert it with gguf-convert-endian")
    if version not in VERSIONS:
        raise CheckpointError(f"{head.path} is GGUF version {version}; Pagoda reads {', '.join(map(str, VERSIONS))}")
    return head.number("Q", 2)


def _read_metadata(head: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = head.text()
        metadata[key] = head.value(head.number("I")[0])
    return metadata


def _read_entry(head: _Cursor) -> Entry:
    name = head.text()
    (rank,) = head.number("I")
    if rank > 8:
        raise CheckpointError(f"{head.path}: {name!r} has {rank} dimensions at byte {head.position}; the file is corrupt")
    shape = tuple(reversed(head.number("Q", rank)))
    return Entry(name, shape, *head.number("I"), *head.number("Q"))


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
