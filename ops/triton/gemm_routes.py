"""Which way a product with few rows goes: a table that `benchmarks/gpu_kernels.py` measures, per device family."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Route(NamedTuple):
    """Tile of a program: columns and inner numbers; programs that share a tile's inner dimension (0: one row, no matrix units)."""

    block_n: int
    block_k: int
    split: int
    warps: int = 4
    stages: int = 4

    def depth(self, itemsize: int) -> int:
        """Stages of the pipeline for numbers of so many bytes: ways are measured with two, and wider ones take the room of several."""
        return max(1, self.stages * 2 // itemsize)


VECTORS = (Route(4, 1024, 0), Route(8, 1024, 0), Route(16, 512, 0), Route(2, 2048, 0), Route(4, 2048, 0, 8), Route(8, 512, 0, 4))
"""Ways with one row that the benchmark tries."""

TILES = tuple(
    Route(block_n, block_k, split, 4, stages)
    for block_n, block_k, stages in ((16, 256, 4), (32, 128, 5), (32, 256, 3), (64, 128, 4), (64, 64, 6))
    for split in (1, 2, 3, 4, 6, 8)
)
"""Ways with the matrix units that the benchmark tries."""


def route(rows: int, columns: int, inner: int) -> Route | None:
    """The measured way of this product, that of the next larger number of rows; None: torch's. One row of an unmeasured one is ours too."""
    ways = _table("routes").get((columns, inner))
    if ways is None:
        return (Route(8, 512, 0) if columns >= 4096 else Route(2, 2048, 0)) if rows == 1 else None
    fitting = [measured for measured in ways if measured >= rows and (rows == 1) == (measured == 1)]
    return ways[min(fitting)] if fitting else None


JOINED_VECTORS = (
    Route(4, 1024, 0), Route(2, 1024, 0), Route(4, 512, 0), Route(8, 512, 0), Route(8, 1024, 0, 8), Route(2, 2048, 0), Route(4, 2048, 0, 8),
)  # fmt: skip
JOINED = tuple(Route(block_n, block_k, 1, 4, stages) for block_n in (16, 32) for block_k, stages in ((128, 4), (256, 2)))
"""Ways with the matrix units that the benchmark tries for products joined with what is around them."""


def joined_route(rows: int, columns: int, inner: int, gated: bool) -> Route | None:
    """The measured way of a product that takes the addition and norm before it along, and the activation; None: one after the other."""
    ways = _table("joined_gated" if gated else "joined").get((columns, inner))
    if ways is None:
        return Route(4, 1024, 0) if rows == 1 and inner <= 4096 else None
    fitting = [measured for measured in ways if measured >= rows and (rows == 1) == (measured == 1)]
    return ways[min(fitting)] if fitting else None


@cache
def _table(name: str) -> dict[tuple[int, int], dict[int, Route | None]]:
    """(columns, inner) → rows → way."""
    path = Path(__file__).parent / "gemm_routes.json"
    table: dict[tuple[int, int], dict[int, Route | None]] = {}
    for columns, inner, rows, way in json.loads(path.read_text()).get(name, ()):
        table.setdefault((columns, inner), {})[rows] = Route(*way) if way else None
    return table
