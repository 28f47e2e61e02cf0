"""Every measured way of a product fits into a program's shared memory, for numbers of two and of four bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pagoda.ops.triton.gemm_routes as routes
import pytest
from pagoda.ops.triton.gemm_routes import Route

SHARED = 232_448
"""Bytes that a program may have on the devices where the ways were measured (sm_90)."""
TABLES = json.loads((Path(routes.__file__).parent / "gemm_routes.json").read_text())


def shared_bytes(way: Route, rows: int, itemsize: int, gated: bool) -> int:
    block_m = max(16, 1 << (rows - 1).bit_length())
    columns = way.block_n * (2 if gated else 1)
    return way.depth(itemsize) * (block_m + columns) * way.block_k * itemsize


@pytest.mark.parametrize("itemsize", [2, 4])
def test_measured_ways_fit(itemsize: int) -> None:
    checked = 0
    for name in ("routes", "joined", "joined_gated"):
        for columns, inner, rows, way in TABLES.get(name, ()):
            if way and way[2] > 0:
                need = shared_bytes(Route(*way), rows, itemsize, name == "joined_gated")
                assert need <= SHARED, (name, columns, inner, rows, way, need)
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize(("columns", "inner"), [(6144, 4096), (28672, 4096), (4096, 14336), (576, 320)])
def test_float8_ways_fit(columns: int, inner: int, block: int) -> None:
    for rows in (1, 2, 16, 40, 64, 65, 256, 4000):
        way = routes.fp8_route(rows, columns, inner, block)
        assert way is not None or block == 0
        if way is not None and way.split:
            assert not block or (block % way.block_n == 0 and block % way.block_k == 0)
            block_m = min(max(16, 1 << (rows - 1).bit_length()), way.block_m)
            assert way.depth(2) * way.block_k * (way.block_n + block_m * (1 if way.both else 2)) <= SHARED, (rows, way)


def test_every_float8_way_that_the_benchmark_tries_fits_with_64_rows() -> None:
    for way in routes.FP8_TILES:
        assert way.depth(2) * way.block_k * (way.block_n + 64 * (1 if way.both else 2)) <= SHARED, way


def test_wider_numbers_have_a_shallower_pipeline() -> None:
    assert [Route(16, 256, 1, 4, stages).depth(4) for stages in (1, 4, 5)] == [1, 2, 2]
    assert Route(16, 256, 1, 4, 5).depth(2) == 5
