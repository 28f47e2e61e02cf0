"""Memory for packed weights: aligned, apart from each other, and given back."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

from pagoda.ops.native.arena import CHUNK, Arena


def test_pieces_are_aligned_and_apart() -> None:
    arena = Arena()
    sizes = (1, 63, 64, 100_000, CHUNK // 2, CHUNK // 2 + 1, CHUNK + 5, 7)
    pieces = [arena.take(size) for size in sizes]
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.numel()) for piece in pieces)
    assert [piece.numel() for piece in pieces] == list(sizes)
    assert [piece.untyped_storage().nbytes() for piece in pieces] == list(sizes)
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_memory_goes_with_its_pieces() -> None:
    arena = Arena()
    gc.collect()
    before = _resident()
    pieces = [arena.take(CHUNK // 4).fill_(1) for _ in range(32)]
    full = _resident() - before
    del pieces
    gc.collect()
    # What other tests left behind may be given back meanwhile, so that less than the eight chunks shows.
    assert full >= 4 * CHUNK
    assert _resident() - before <= 2 * CHUNK


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
