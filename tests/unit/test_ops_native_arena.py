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
    """Eight chunks, of which the last is kept for the next piece. By the process's mappings: what is resident depends on others."""
    arena = Arena()
    pieces = [arena.take(CHUNK // 4).fill_(1) for _ in range(32)]
    places = [piece.data_ptr() for piece in pieces]
    assert all(_mapped(places))
    del pieces
    gc.collect()
    # Others may have mapped something in the meantime, but hardly in all these places.
    assert sum(_mapped(places)) <= 2 * 4 + 4


def _mapped(places: list[int]) -> list[bool]:
    """Whether each address lies in a mapping of this process."""
    spans = [line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return [any(int(start, 16) <= place < int(end, 16) for start, end in spans) for place in places]
