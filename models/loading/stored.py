"""Tensors in files: a `FileTensor` maps just the bytes that are asked for."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from pagoda.hal.errors import CheckpointError
from pagoda.ops.gguf.types import GgmlType

_FLOATS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e8m0fnu complex64"
_INTEGERS = "int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in f"{_FLOATS} {_INTEGERS}".split(" ")}
"""Torch dtypes that a checkpoint may store, by name."""


@dataclass(frozen=True)
class FileTensor:
    """A contiguous tensor in a file.

    Attributes:
        name: as in the checkpoint.
        shape: logical numbers, outermost first.
        dtype: name of a torch dtype or of a ggml block type.
        path, offset: where its first byte is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return _rows(self.shape) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one run along the last dimension."""
        width = self.shape[-1] if self.shape else 1
        if self.dtype in DTYPES:
            return width * DTYPES[self.dtype].itemsize
        return GgmlType[self.dtype].row_bytes(width)

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """See `StoredTensor.read`: a view of a private mapping of the leading slice's bytes."""
        if not self.shape:
            return map_bytes(self.path, self.offset, self.nbytes).view(DTYPES[self.dtype])[0]
        start, stop = _bounds(index[0] if index else slice(None), self.shape[0])
        if len(self.shape) == 1 and self.dtype not in DTYPES:
            start, stop = 0, self.shape[0]
        stride = self.nbytes // self.shape[0] if self.shape[0] else 0
        data = map_bytes(self.path, self.offset + start * stride, (stop - start) * stride)
        leading = (stop - start, *self.shape[1:])
        if self.dtype in DTYPES:
            return data.view(DTYPES[self.dtype]).view(leading)[(slice(None), *index[1:])]
        return data.view(*leading[:-1], self.row_bytes)[self._block_index(index)]

    def _block_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        rank = len(self.shape)
        outer = (slice(None), *index[1:rank]) if rank > 1 else index
        if len(outer) < rank or len(index) < rank:
            return outer
        return (*outer[: rank - 1], block_slice(self, outer[rank - 1]))


def block_slice(tensor: FileTensor, index: slice) -> slice:
    """A slice over the numbers of a row → over its bytes. Raises `CheckpointError` off block boundaries."""
    kind, width = GgmlType[tensor.dtype], tensor.shape[-1]
    start, stop = _bounds(index, width)
    if start % kind.block or stop % kind.block:
        raise CheckpointError(
            f"{tensor.name}: numbers {start} to {stop} of a row were asked for, but {tensor.dtype} is stored in blocks of {kind.block};"
            " split at block boundaries or load it dequantised"
        )
    return slice(start // kind.block * kind.bytes, stop // kind.block * kind.bytes)


def map_bytes(path: Path, offset: int, length: int) -> torch.Tensor:
    """Bytes of a file as a uint8 tensor, mapped and not read; the mapping lives as long as the tensor.

    The mapping is private: writing to the tensor never reaches the file. Raises `CheckpointError` past the end of the file.
    """
    if length == 0:
        return torch.empty(0, dtype=torch.uint8)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if offset + length > size:
            raise CheckpointError(f"{path}: bytes {offset} to {offset + length} are needed, the file ends at {size}; fetch it again")
        skip = offset % mmap.ALLOCATIONGRANULARITY
        region = mmap.mmap(file.fileno(), skip + length, access=mmap.ACCESS_COPY, offset=offset - skip)
    if hasattr(region, "madvise"):
        region.madvise(mmap.MADV_WILLNEED)
    data = torch.frombuffer(region, dtype=torch.uint8, count=length, offset=skip)
    # torch wants typed views at multiples of their size; files may start a tensor anywhere.
    return data if skip % 8 == 0 else data.clone()


def _bounds(index: slice, size: int) -> tuple[int, int]:
    start, stop, step = index.indices(size)
    if step != 1:
        raise ValueError(f"a step of {step} is not supported")
    return start, max(start, stop)


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows
