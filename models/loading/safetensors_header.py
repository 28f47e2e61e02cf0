"""The header of one safetensors file, checked against the file before anything is read from it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.json_file import parsed
from pagoda.models.loading.stored import DTYPES, FileTensor

HEADER_LIMIT = 100_000_000
"""Largest header that the format allows, in bytes."""

SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


def read_header(path: Path) -> dict[str, FileTensor]:
    """The tensors of a file by name, in file order. Raises `CheckpointError` when header and file disagree."""
    size, length, header = _raw_header(path)
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = [_tensor(path, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: tensor.offset)
    _check_extents(path, tensors, start, size)
    return {tensor.name: tensor for tensor in tensors}


def _raw_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > HEADER_LIMIT or 8 + length > size:
                raise CheckpointError(
                    f"{path}: a header of {length} bytes is announced, the file has {size} bytes; it is truncated or no safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} can not be read: {error.strerror}") from None
    header = parsed(text, f"{path}: the header of {length} bytes")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    return size, length, header


def _tensor(path: Path, name: str, entry: Any, start: int) -> FileTensor:
    match entry:
        case {"dtype": str(stored), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(map(_is_size, shape)):
            pass
        case _:
            raise CheckpointError(f"{path}: the entry of {name} is {entry!r:.200}; expected dtype, shape and two data_offsets")
    if stored not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"{path}: {name} is stored as {stored}; known are {', '.join(SAFETENSORS_DTYPES)}")
    dtype = SAFETENSORS_DTYPES[stored]
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if begin < 0 or end - begin != expected:
        raise CheckpointError(f"{path}: {name} of shape {shape} in {stored} takes {expected} bytes, its entry spans {end - begin}")
    return FileTensor(name, tuple(shape), dtype, path, start + begin)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_extents(path: Path, tensors: list[FileTensor], start: int, size: int) -> None:
    position = start
    for tensor in tensors:
        if tensor.offset != position:
            relation = "overlaps" if tensor.offset < position else "leaves a hole after"
            raise CheckpointError(
                f"{path}: {tensor.name} begins at byte {tensor.offset}, expected {position}: it {relation} the one before"
            )
        position += tensor.nbytes
    if position != size:
        state = "truncated" if size < position else "followed by stray bytes"
        raise CheckpointError(f"{path}: the header describes {position} bytes, the file has {size}: it is {state}; fetch it again")
