"""One GGUF file: its metadata and the directory of its tensors, checked against the file's size."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.stored import FileTensor
from pagoda.ops.gguf.decode import DECODERS, PLAIN_DTYPES
from pagoda.ops.gguf.types import GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Metadata value types → struct codes."""
STRING, ARRAY = 8, 9


class GgufFile:
    """The head of a GGUF file.

    Attributes:
        path: the file.
        metadata: values by key: numbers, bools, strings, lists of them.
        tensors: by GGUF name; read lazily.

    Raises `CheckpointError` where the file is truncated, corrupt, of another byte order, or holds an unknown format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _map_head(path) as data:
            head = _Cursor(path, data)
            tensor_count, value_count = _preamble(head)
            self.metadata: Mapping[str, Any] = _read_metadata(head, value_count)
            entries = [_read_entry(head) for _ in range(tensor_count)]
            start = _aligned(head.position, self._alignment())
            self.tensors: Mapping[str, FileTensor] = _directory(path, entries, start, len(data))

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
        layout = struct.Struct(f"<{count}{code}")
        return layout.unpack(self.take(layout.size))

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


def _read_entry(head: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = head.text()
    (rank,) = head.number("I")
    if rank > 8:
        raise CheckpointError(f"{head.path}: {name!r} has {rank} dimensions at byte {head.position}; the file is corrupt")
    shape = tuple(reversed(head.number("Q", rank)))
    return name, shape, *head.number("I"), *head.number("Q")


def _directory(path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for name, shape, code, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path}: two tensors are named {name}")
        tensors[name] = FileTensor(name, shape, _dtype(path, name, code), path, start + offset)
    _check_extents(path, list(tensors.values()), size)
    return tensors


def _dtype(path: Path, name: str, code: int) -> str:
    kind = GgmlType(code) if code in GgmlType._value2member_map_ else None
    if kind in PLAIN_DTYPES:
        return str(PLAIN_DTYPES[kind]).removeprefix("torch.")
    if kind not in DECODERS:
        raise CheckpointError(f"{path}: {name} is stored as ggml type {kind.name if kind else code}, which Pagoda can not decode")
    return kind.name


def _check_extents(path: Path, tensors: list[FileTensor], size: int) -> None:
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        try:
            length = tensor.nbytes
        except ValueError as error:
            raise CheckpointError(f"{path}: {tensor.name}: {error}") from None
        if tensor.offset < end:
            raise CheckpointError(f"{path}: {tensor.name} begins at byte {tensor.offset}, inside the tensor before, which ends at {end}")
        end = tensor.offset + length
        if end > size:
            raise CheckpointError(
                f"{path}: {tensor.name} needs bytes up to {end}, the file ends at {size}; it is truncated, fetch it again"
            )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
