"""Which rows of a decode step begin with the same pages, so that attention can read those once for all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.plan import IntArray, StepPlan

UNIT = 256
"""Tokens that a shared beginning is counted in."""
FEWEST_ROWS, FEWEST_TOKENS = 4, 1024
"""Below, reading again is cheaper than another launch."""


def shared_beginnings(plan: StepPlan, page_sizes: tuple[int, ...]) -> tuple[IntArray | None, ...]:
    """For each cache group `PagedBatch.shared` of its rows, or None where too little is shared."""
    if plan.num_tokens != plan.num_rows or plan.num_rows < FEWEST_ROWS:
        return (None,) * len(page_sizes)
    return tuple(_shared(table, plan.starts, size) for table, size in zip(plan.block_tables, page_sizes, strict=True))


class Beginnings(NamedTuple):
    """Of each cache group `PagedBatch.shared` of a step's rows, or None; and whether they begin alike, made use of or not."""

    shared: tuple[IntArray | None, ...]
    alike: tuple[bool, ...]


def allowed_beginnings(
    plan: StepPlan, page_sizes: tuple[int, ...], takes: bool, allowed: frozenset[tuple[bool, ...]] | None
) -> Beginnings:  # fmt: skip
    """`shared_beginnings` where the device `takes` them, and in the sets of cache groups that are `allowed`; None: any."""
    nothing = (None,) * len(page_sizes)
    shared = shared_beginnings(plan, page_sizes) if takes else nothing
    alike = tuple(one is not None for one in shared)
    return Beginnings(shared if allowed is None or alike in allowed else nothing, alike)


def _shared(table: IntArray, starts: IntArray, size: int) -> IntArray | None:
    """Among rows with the most common first page, as far as all of them agree and all of their tokens are computed."""
    firsts, counts = np.unique(table[:, 0], return_counts=True)
    most = int(counts.argmax())
    if counts[most] < FEWEST_ROWS or firsts[most] == 0:
        return None
    members = np.flatnonzero(table[:, 0] == firsts[most])
    pages = table[members]
    differ = np.flatnonzero((pages != pages[0]).any(0) | (pages[0] == 0))
    agreed = int(differ[0]) if len(differ) else table.shape[1]
    tokens = min(agreed * size, int(starts[members].min())) // UNIT * UNIT
    if tokens < FEWEST_TOKENS:
        return None
    shared = np.zeros(len(table) + 1, np.int32)
    shared[0], shared[1 + members] = members[0], tokens
    return shared
