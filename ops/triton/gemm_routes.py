"""Which way a product with few rows goes: a table that `benchmarks/gpu_kernels.py` measures, per device family."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class Route(NamedTuple):
    """Tile of a program: columns and inner numbers; programs that share a tile's inner dimension (0: one row, no matrix units). `turns`: of
    one row, tiles that a program takes one after the other."""

    block_n: int
    block_k: int
    split: int
    warps: int = 4
    stages: int = 4
    turns: int = 1

    def depth(self, itemsize: int) -> int:
        """Stages of the pipeline for numbers of so many bytes: ways are measured with two, and wider ones take the room of several."""
        return max(1, self.stages * 2 // itemsize)


VECTORS = (Route(4, 1024, 0), Route(8, 1024, 0), Route(16, 512, 0), Route(2, 2048, 0), Route(4, 2048, 0, 8), Route(8, 512, 0, 4))
"""Ways with one row that the benchmark tries."""
TURNS = tuple(way._replace(turns=turns) for way in (Route(4, 1024, 0), Route(8, 512, 0), Route(2, 2048, 0)) for turns in (2, 4, 8))
"""The same, with some tiles one after the other, for products whose programs are many times what a device holds."""

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


class Fp8Route(NamedTuple):
    """The same for float8 weights. Programs take up to `block_m` rows; `both`: x is made float8 first."""

    block_n: int
    block_k: int
    split: int
    warps: int = 4
    stages: int = 4
    block_m: int = 64
    both: bool = False

    def depth(self, itemsize: int) -> int:
        """Stages of the pipeline: ways are measured with x of one or two bytes, and a wider one takes the room of several."""
        return max(1, self.stages * 2 // max(itemsize, 2))


ONE_SCALE = Fp8Route(0, 0, 0, both=True)
"""torch's product of codes alone, its scales applied after it."""
FP8_VECTORS = (
    Fp8Route(4, 1024, 0), Fp8Route(8, 1024, 0), Fp8Route(4, 2048, 0), Fp8Route(2, 2048, 0), Fp8Route(8, 2048, 0, 8),
    Fp8Route(16, 1024, 0, 8), Fp8Route(2, 4096, 0), Fp8Route(4, 4096, 0, 8),
)  # fmt: skip
FP8_TILES = tuple(
    Fp8Route(block_n, block_k, split, warps, stages, 64, both)
    for both in (False, True)
    for block_n, block_k, warps, stages in ((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4))
    for split in (1, 2, 3, 4, 6)
)
"""Ways that the benchmark tries, with one row and with the matrix units."""
FP8_JOINED = (
    Route(4, 1024, 0), Route(8, 1024, 0), Route(4, 2048, 0), Route(2, 2048, 0), Route(2, 4096, 0), Route(4, 4096, 0, 8),
    Route(8, 2048, 0, 8),
)  # fmt: skip
"""With one row, of products joined with what is around them."""


def fp8_route(rows: int, columns: int, inner: int, block: int) -> Fp8Route | None:
    """The measured way of this product with float8 weights, that of the next larger number of rows; None: torch's, with float8 rows."""
    ways = _fp8_table().get((columns, inner), {})
    fitting = [measured for measured in ways if measured >= rows and (rows == 1) == (measured == 1)]
    found = ways[min(fitting)] if fitting else _fp8_guess(rows, columns)
    if block == 0:
        return found
    # A scale of squares is applied once a tile, which must lie within one; torch has no such product here.
    found = found if found and found.block_n else Fp8Route(128, 128, 1, 8, 4, 128, True)
    return found if found.split == 0 else found._replace(block_n=min(found.block_n, block), block_k=min(found.block_k, block))


def _fp8_guess(rows: int, columns: int) -> Fp8Route | None:
    if rows == 1:
        return Fp8Route(8, 1024, 0) if columns >= 4096 else Fp8Route(4, 1024, 0)
    return Fp8Route(64, 128, 2 if columns < 16384 else 1) if rows <= 64 else None


@cache
def _fp8_table() -> dict[tuple[int, int], dict[int, Fp8Route | None]]:
    """(columns, inner) → rows → way."""
    table: dict[tuple[int, int], dict[int, Fp8Route | None]] = {}
    for columns, inner, rows, way in _read().get("fp8", ()):
        table.setdefault((columns, inner), {})[rows] = Fp8Route(*way) if way else None
    return table


JOINED_VECTORS = (
    Route(4, 1024, 0), Route(2, 1024, 0), Route(4, 512, 0), Route(8, 512, 0), Route(8, 1024, 0, 8), Route(2, 2048, 0), Route(4, 2048, 0, 8),
)  # fmt: skip
JOINED = (Route(64, 0, 1, 4), Route(64, 0, 1, 8))
"""Ways with several rows, whole columns each (`block_k` 0), that the benchmark tries for products joined with what is around them."""


def joined_route(rows: int, columns: int, inner: int, gated: bool) -> Route | None:
    """The measured way of a product that takes the addition and norm before it along, and the activation; None: one after the other."""
    ways = _table("joined_gated" if gated else "joined").get((columns, inner))
    if ways is None:
        return Route(4, 1024, 0) if rows == 1 and inner <= 4096 else None
    fitting = [measured for measured in ways if measured >= rows and (rows == 1) == (measured == 1)]
    return ways[min(fitting)] if fitting else None


def joined_fp8_route(columns: int, inner: int, gated: bool) -> Route | None:
    """The measured way of one row with float8 weights and what is around the product; None: one after the other."""
    ways = _table("fp8_joined_gated" if gated else "fp8_joined").get((columns, inner))
    return None if ways is None else ways[1]


def forget() -> None:
    """Read the tables again when they are next asked: they have been written."""
    for cached in (_read, _table, _fp8_table):
        cached.cache_clear()


@cache
def _table(name: str) -> dict[tuple[int, int], dict[int, Route | None]]:
    """(columns, inner) → rows → way."""
    table: dict[tuple[int, int], dict[int, Route | None]] = {}
    for columns, inner, rows, way in _read().get(name, ()):
        table.setdefault((columns, inner), {})[rows] = Route(*way) if way else None
    return table


@cache
def _read() -> Any:
    return json.loads((Path(__file__).parent / "gemm_routes.json").read_text())
