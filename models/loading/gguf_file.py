"""One GGUF file: its metadata, and its tensors checked against the file's size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda.hal.errors import CheckpointError
from pagoda.models.loading.gguf_head import GgufHead
from pagoda.models.loading.stored import FileTensor
from pagoda.ops.gguf.decode import DECODERS, PLAIN_DTYPES
from pagoda.ops.gguf.types import GgmlType


class GgufFile:
    """A GGUF file.

    Attributes:
        path: the file.
        metadata: see `GgufHead`.
        tensors: by GGUF name; read lazily.

    Raises `CheckpointError` where the file is truncated, corrupt, of another byte order, or holds an unknown format.
    """

    def __init__(self, path: Path) -> None:
        head = GgufHead(path)
        self.path = path
        self.metadata: Mapping[str, Any] = head.metadata
        self.tensors: Mapping[str, FileTensor] = _directory(head)


def _directory(head: GgufHead) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for name, shape, code, offset in head.entries:
        if name in tensors:
            raise CheckpointError(f"{head.path}: two tensors are named {name}")
        tensors[name] = FileTensor(name, shape, _dtype(head.path, name, code), head.path, head.start + offset)
    _check_extents(head, list(tensors.values()))
    return tensors


def _dtype(path: Path, name: str, code: int) -> str:
    kind = GgmlType(code) if code in GgmlType._value2member_map_ else None
    if kind in PLAIN_DTYPES:
        return str(PLAIN_DTYPES[kind]).removeprefix("torch.")
    if kind not in DECODERS:
        raise CheckpointError(f"{path}: {name} is stored as ggml type {kind.name if kind else code}, which Pagoda can not decode")
    return kind.name


def _check_extents(head: GgufHead, tensors: list[FileTensor]) -> None:
    path, size, end = head.path, head.size, head.start
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
    if size - end >= head.alignment:
        raise CheckpointError(f"{path}: no tensor takes the last {size - end} bytes: its count of tensors is damaged, fetch it again")
