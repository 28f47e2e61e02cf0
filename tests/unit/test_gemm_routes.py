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


def test_wider_numbers_have_a_shallower_pipeline() -> None:
    assert [Route(16, 256, 1, 4, stages).depth(4) for stages in (1, 4, 5)] == [1, 2, 2]
    assert Route(16, 256, 1, 4, 5).depth(2) == 5
