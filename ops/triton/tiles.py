"""Tile sizes of paged attention in Triton, by what a step holds; `benchmarks/gpu_attention.py --tiles` measures the choices."""

from __future__ import annotations

from typing import NamedTuple

PROMPT_ROWS = 128
"""Rows (query tokens × heads of a group) of a block of a long prompt."""


class Tile(NamedTuple):
    """How one launch is cut.

    Attributes:
        rows: query rows of a block, a power of two and at least 16.
        keys: keys of a tile.
        warps, stages: of a program.
        descriptor: K and V through tensor descriptors, where the page allows it.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    descriptor: bool


def tile_of(rows: int, dim: int, nbytes: int, page: int, shared: int) -> Tile:
    """The tile for blocks of up to `rows` rows, heads of `dim` numbers, `nbytes` each, pages of `page` tokens, where a program may have
    `shared` bytes of shared memory."""
    wide = dim > 128 or nbytes > 2
    if rows <= 16:
        # A stage holds a tile, and the program a little more than its stages: four of heads of 128 are too much for 64 KiB.
        return Tile(16, 32, 4, 3, False) if wide else Tile(16, 64, 2, 4 if 4 * 64 * dim * nbytes < shared else 3, page % 64 == 0)
    if rows <= 64 or wide:
        return Tile(64 if dim <= 128 else 32, 32 if wide else 64, 4, 2, False)
    return Tile(PROMPT_ROWS, 64, 4, 3, page % 64 == 0) if page % 64 == 0 else Tile(PROMPT_ROWS, 64, 8, 3, False)


SHARED = Tile(128, 64, 4, 3, True)
"""For keys that decodes share: many rows meet each tile, as in a prompt."""


def latent_tile(rows: int, dtype: str, kv_dtype: str) -> Tile:
    """The tile for attention over latents, whose keys are the values too. Of its stages a look-up of the page takes every other one."""
    if dtype == "float32":
        return Tile(16 if rows <= 16 else 32, 16, 4, 1, False)
    if rows <= 16:
        # Keys that become wider pass through registers.
        return Tile(16, 32, 8, 7, False) if kv_dtype != dtype else Tile(16, 32, 4, 7, False)
    return Tile(32, 32, 8, 5, False) if rows <= 32 else Tile(64, 32, 8, 5, False)
