"""Stages of Triton's programs: as many as the shared memory of a device holds."""

from __future__ import annotations

import pytest
from pagoda.ops.triton.tiles import Tile, segment_stages

BESIDE = 8192
HEADS_OF_64 = Tile(128, 64, 8, 3, False)
A100, RTX5090, RX9070XT = 166_912, 101_376, 65_536
"""Bytes of shared memory of a program."""


@pytest.mark.parametrize(
    ("shared", "bias", "most", "stages"),
    [(A100, 0, 8, 3), (A100, 4, 8, 3), (RTX5090, 0, 8, 3), (RTX5090, 4, 8, 2), (RX9070XT, 0, 2, 2), (20_000, 4, 8, 1)],
)
def test_a_bias_that_is_staged_with_the_keys_takes_room_of_stages(shared: int, bias: int, most: int, stages: int) -> None:
    assert segment_stages(HEADS_OF_64, 64, 2, bias, shared - BESIDE, most) == stages


@pytest.mark.parametrize("shared", [A100, RTX5090])
def test_what_is_staged_fits(shared: int) -> None:
    """The compiler's own sum (Triton 3.6, sm80 and sm120): one stage less of keys, values and the bias, beside the queries."""
    count = segment_stages(HEADS_OF_64, 64, 2, 4, shared - BESIDE, 8)
    assert count > 1 and (count - 1) * (2 * 64 * 64 * 2 + 128 * 64 * 4) + 128 * 64 * 2 <= shared
