"""Contexts of prompts laid one after another: where each request's keys and values go, and for which prompts that pays.

fa3 looks up pages row by row, and is faster where keys and values are whole tensors, which the device's bulk copies bring.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.ops.attention import AttentionFacts

ROWS = 128
"""A context begins at a multiple of so many rows, the keys of fa3's largest tile, and zeros fill it up: no tile holds keys of two
requests, whose values would meet weights of 0, and 0 · NaN is NaN."""
NOTHING = -1
"""Count of a part that is left alone."""
PAGED_FLOPS, ROWS_FLOPS, COPY_BYTES, LAUNCHES = 482e12, 586e12, 3.65e12, 4e-6
"""What an H200 does in a second with K and V in pages, with them as rows, and of laying rows (`benchmarks/gpu_attention.py --only W4`,
two prompts of 4,096 with 16 heads on 8); seconds for the launches that a captured step has more."""


class Metadata(NamedTuple):
    """What fa3 is planned from, on the host: query starts `[R + 1]`, keys of each request `[R]`."""

    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]


class Contexts(NamedTuple):
    """Where the contexts of a step lie.

    Attributes:
        parts: `[M, 2]` int32, of each page of rows: its entry of the flattened block table, and how many of its tokens are keys; the rows
            behind these are zeros.
        bounds: `[2 R + 1]` int32, ends of each context and of the zeros behind it, by turns, from 0 on.
    """

    parts: NDArray[np.int32]
    bounds: NDArray[np.int32]


def padded(lengths: NDArray[np.int32], page: int) -> NDArray[np.int32]:
    """Rows that contexts take, zeros included."""
    whole = lcm(ROWS, page)
    taken: NDArray[np.int32] = (-(-lengths // whole) * whole).astype(np.int32)
    return taken


def contexts(lengths: NDArray[np.int32], page: int, width: int, room: int = 0) -> Contexts:
    """The layout of contexts of `lengths` keys, the rows of whose block table begin `width` entries apart. `room`: parts, where their
    number is fixed; those too many are left alone."""
    taken = padded(lengths, page)
    each = taken // page
    request = np.repeat(np.arange(len(lengths)), each)
    column = np.arange(len(request)) - np.repeat(np.cumsum(each) - each, each)
    count = np.clip(lengths[request] - column * page, 0, page)
    parts = np.full((max(room, len(request)), 2), NOTHING, np.int32)
    parts[: len(request), 0] = np.where(count > 0, request * width + column, 0)
    parts[: len(request), 1] = count
    bounds = np.zeros(2 * len(lengths) + 1, np.int32)
    bounds[2::2] = np.cumsum(taken)
    bounds[1::2] = bounds[:-2:2] + lengths
    return Contexts(parts, bounds)


def pays(facts: AttentionFacts, step: Metadata) -> bool:
    """Whether prompts win more by having their contexts as rows than it costs to lay them."""
    queries, keys = np.diff(step.query_start).astype(np.float64), step.seq_lens.astype(np.float64)
    seen = queries * keys - queries * (queries - 1) / 2
    if facts.window is not None:
        seen = np.minimum(seen, queries * facts.window)
    flops = 4 * facts.num_heads * facts.head_dim * float(seen.sum())
    nbytes = 8 * facts.num_kv_heads * facts.head_dim * int(padded(step.seq_lens, facts.page_size).sum())
    return flops * (1 / PAGED_FLOPS - 1 / ROWS_FLOPS) > nbytes / COPY_BYTES + LAUNCHES
