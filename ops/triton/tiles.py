"""Tile sizes of paged attention in Triton, by what a step holds; `benchmarks/gpu_attention.py --tiles` measures the choices."""

from __future__ import annotations

from typing import NamedTuple

PROMPT_ROWS = 128
"""Rows (query tokens × heads of a group) of a block of a long prompt."""


LARGE = 160_000
"""Bytes of shared memory that large tiles need."""


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


def tile_of(rows: int, dim: int, nbytes: int, page: int, shared: int, narrow: bool = False, requests: int = 1) -> Tile:
    """The tile for blocks of up to `rows` rows, heads of `dim` numbers, `nbytes` each, pages of `page` tokens, where a program may have
    `shared` bytes of shared memory. `narrow`: pages hold float8, which takes registers and time to become wider."""
    if nbytes > 2:
        return float32_tile(rows, dim)
    wide = dim > 128
    if rows <= 16 and narrow and not wide and page % 64 == 0 and shared >= LARGE:
        return Tile(16, 64, 4, 4, True) if requests < 8 else Tile(16, 64, 2, 7, True)
    if rows <= 16:
        return Tile(16, 32, 4, 3, False) if wide else Tile(16, 64, 2, 4, page % 64 == 0)
    if rows <= 64 or wide:
        return Tile(64 if dim <= 128 else 32, 32 if wide else 64, 4, 2, False)
    return Tile(PROMPT_ROWS, 64, 4, 3, page % 64 == 0) if page % 64 == 0 else Tile(PROMPT_ROWS, 64, 8, 3, False)


def float32_tile(rows: int, dim: int) -> Tile:
    """For numbers of 32 bits, which are multiplied without matrix instructions: a thread holds whole rows of both factors, and where these
    are more than its registers a compiler works for half a minute on where to put them (64 × 32: 1 to 6 KB spilled, 10 to 22 s; as here
    none to 0.5 KB, 3 to 5 s)."""
    if dim > 64 or rows <= 16:
        return Tile(16, 32 if dim <= 128 else 16, 4, 2, False)
    return Tile(32, 16, 4, 2, False)


SHARED = Tile(128, 64, 4, 3, True)
"""For keys that decodes share: many rows meet each tile, as in a prompt."""


def in_registers(tile: Tile, dim: int) -> Tile:
    """The tile for waves of 32, each of which holds all its keys and values: as many, of heads of `dim` numbers, as 256 registers take."""
    return tile._replace(rows=min(tile.rows, 64), keys=min(tile.keys, 32 if dim <= 64 else 16), warps=4, stages=1, descriptor=False)


def by_warps(tile: Tile, dim: int, half: bool) -> Tile:
    """The tile for matrix instructions of a warp, whose numbers all lie in its registers, float8's on their way to float16 too."""
    if tile.rows == 16:
        return tile._replace(keys=32, warps=4, stages=min(tile.stages, 4)) if half else tile
    return tile._replace(keys=32 if dim > 64 or half else tile.keys, warps=8 if tile.rows > 64 or (half and dim > 128) else tile.warps)


def latent_tile(rows: int, width: int, shared: int) -> Tile:
    """The tile for attention over latents, whose keys are the values too, `width` numbers of 16 bits. Of its stages a look-up of the page
    takes every other one, so that two tiles are there at a time."""
    best = Tile(16, 64, 8, 5, False) if rows <= 16 else Tile(32 if rows <= 32 else 64, 32, 8, 5, False)
    fitting = (tile for tile in (best, Tile(16, 32, 4, 5, False)) if (4 * tile.keys + 2 * tile.rows) * width + 8192 <= shared)
    return next(fitting, Tile(16, 16, 4, 1, False))


def segment_stages(tile: Tile, dim: int, nbytes: int, bias: int, shared: int, most: int) -> int:
    """Stages of attention of whole sequences, `most` at most, in `shared` bytes: each holds a tile of keys and of values, heads of `dim`
    numbers of `nbytes`, beside the queries; all but one what is loaded of a bias, `bias` bytes for each row and key, where that is staged
    too."""
    stage, loaded, queries = 2 * tile.keys * dim * nbytes, tile.rows * tile.keys * bias, tile.rows * dim * nbytes
    return max(1, min(tile.stages, most, (shared - queries + loaded) // (stage + loaded)))
