"""Where each array of a step lies in the one buffer that crosses to the device: a header of offsets, then aligned sections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from pagoda.serving.engine.plan import LongArray

VERSION = 4
ALIGNMENT = 64
MAX_GROUPS = 8

DTYPES: dict[str, np.dtype[Any]] = {"int64": np.dtype(np.int64), "int32": np.dtype(np.int32), "float32": np.dtype(np.float32)}

# A section is present when none of its dimensions is 0. Sections that only the bucket decides come first, so that a captured step
# finds them at the same place each time; then masks, which may be one for each row of the bucket.
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("positions", "int64", ("axes", "tokens")),
    ("kv_slots", "int64", ("groups", "tokens")),
    ("sample_rows", "int64", ("samples",)),
    ("sample_slots", "int64", ("samples",)),
    ("draws", "int64", ("samples", "sampling")),
    ("seed", "int64", ("samples", "sampling")),
    ("temperature", "float32", ("samples", "sampling")),
    ("top_p", "float32", ("samples", "sampling")),
    ("min_p", "float32", ("samples", "sampling")),
    ("top_k", "int32", ("samples", "sampling")),
    ("token_ids", "int32", ("tokens",)),
    ("token_slots", "int32", ("tokens",)),
    ("adapters", "int32", ("tokens", "adapters")),
    ("query_start", "int32", ("bounds",)),
    ("seq_lens", "int32", ("rows",)),
    ("cross_lens", "int32", ("rows", "cross")),
    ("shared", "int32", ("groups", "bounds")),
    ("mask_rows", "int64", ("masks",)),
    ("masks", "int32", ("masks", "words")),
    ("drafts", "int32", ("rows", "drafts")),
    ("parents", "int32", ("rows", "parents")),
    ("tree_nodes", "int32", ("rows", "trees")),
    ("tree_seen", "int64", ("tokens", "trees")),
    *((f"table{group}", "int32", ("rows", f"width{group}")) for group in range(MAX_GROUPS)),
    ("penalty_rows", "int64", ("penalties",)),
    ("repetition", "float32", ("penalties",)),
    ("presence", "float32", ("penalties",)),
    ("frequency", "float32", ("penalties",)),
    ("path_rows", "int64", ("paths",)),
    ("path_ids", "int64", ("paths",)),
    ("sample_before", "int64", ("samples", "verified")),
    ("sample_draft", "int64", ("samples", "verified")),
    ("edit_rows", "int64", ("edits",)),
    ("edit_ids", "int64", ("edits",)),
    ("edit_values", "float32", ("edits",)),
    ("logprob_rows", "int64", ("logprobs",)),
    ("span_rows", "int64", ("spans",)),
    ("span_sources", "int64", ("spans",)),
    ("span_first", "int64", ("whole",)),
    ("span_end", "int64", ("whole",)),
    ("tap_layers", "int32", ("taps",)),
    ("tap_rows", "int64", ("tapped",)),
)

DIMS: tuple[str, ...] = (
    "tokens", "rows", "bounds", "samples", "sampling", "axes", "groups", "adapters", "drafts", "parents", "trees", "cross",
    *(f"width{group}" for group in range(MAX_GROUPS)),
    "penalties", "paths", "verified", "edits", "masks", "words", "logprobs", "spans", "whole", "taps", "tapped",
)  # fmt: skip

SWITCHES = ("sampling", "adapters", "trees", "verified", "cross")
"""Dimensions of size 1 where they are present, which arrays do not keep."""

HEADER_WORDS = 4 + len(DIMS) + len(SECTIONS)
"""int64 words: version, bytes in all, real tokens, real rows; then every dimension; then every section's offset, −1 if absent."""

FIRST = -(-HEADER_WORDS * 8 // ALIGNMENT) * ALIGNMENT
"""Where the first section lies."""

FIRST_OTHER = "mask_rows"
"""The first section whose size more than the bucket decides."""


@dataclass(frozen=True)
class Section:
    """One array of the buffer, at byte `offset`."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, eq=False)
class Layout:
    """The sections that a step with these dimensions has; made by `layout_of`, equal by identity. `fixed` bytes, from `FIRST` on, are
    those whose size the bucket decides alone: what a captured step reads."""

    dims: tuple[int, ...]
    sections: MappingProxyType[str, Section]
    nbytes: int
    header: LongArray
    fixed: int

    def write_header(self, out: LongArray, tokens: int, rows: int) -> None:
        """Fill `out` `[HEADER_WORDS]`; `tokens` and `rows` are the real ones, before padding."""
        out[:] = self.header
        out[2:4] = tokens, rows


def read_header(header: LongArray) -> Layout:
    """The layout of a buffer from its first `HEADER_WORDS` int64 words."""
    if header[0] != VERSION:
        raise ValueError(f"step buffer of version {header[0]}, this is {VERSION}")
    return layout_of(tuple(int(size) for size in header[4 : 4 + len(DIMS)]))


@lru_cache(maxsize=512)
def layout_of(dims: tuple[int, ...]) -> Layout:
    """Place every present section; `dims` in the order of `DIMS`."""
    sizes = dict(zip(DIMS, dims))
    offset = HEADER_WORDS * 8
    sections: dict[str, Section] = {}
    fixed = 0
    for name, dtype, names in SECTIONS:
        if name == FIRST_OTHER:
            fixed = _aligned(offset) - FIRST
        shape = tuple(sizes[dim] for dim in names)
        if 0 in shape:
            continue
        offset = _aligned(offset)
        sections[name] = Section(offset, dtype, _squeezed(shape, names))
        offset += sections[name].nbytes
    offsets = [sections[name].offset if name in sections else -1 for name, _, _ in SECTIONS]
    header = np.array([VERSION, offset, 0, 0, *dims, *offsets], np.int64)
    return Layout(dims, MappingProxyType(sections), offset, header, fixed)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _squeezed(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """Without the dimensions that are only switches."""
    return tuple(size for size, name in zip(shape, names) if name not in SWITCHES)
