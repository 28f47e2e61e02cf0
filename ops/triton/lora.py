"""Adapters in Triton: x times the down factors, the inner dimension split over programs, then that times the up factors, added to outputs.

A program has rows of one adapter and reads its factors once for them. Among few rows it looks for its own; many are sorted by adapter
before. Rows without an adapter are in no program. The parts of a layer are columns of one product down, and tiles of one launch up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.lora import LoraFacts
from pagoda.ops.triton.launch import early, fitting_stages
from pagoda.ops.triton.moe_sort import sorted_blocks
from pagoda.ops.triton.order import let_next_start, wait_for_last

FEW, FEW_FLOAT32 = 64, 16
"""Rows among which a program looks for its own. Products of float32 are without matrix instructions, and want small tiles."""
PROGRAMS = 264
"""That keep a large device busy."""
SPLITS = 16
"""Of the inner dimension, at most: what each gives is read again by all programs of the second product."""


@triton.jit
def _mine(order, owner, slots, tokens, ROWS: tl.constexpr, SORTED: tl.constexpr, LEADING: tl.constexpr):
    """(adapter, its rows, which of them there are) of a program's block; −1 where it has nothing to do. LEADING: blocks are rows, and the
    first one of an adapter has all of it; else blocks are adapters, unless rows are SORTED."""
    block, m = tl.program_id(1), tl.arange(0, ROWS)
    if SORTED:
        slot = tl.load(owner + block)
        row = tl.load(order + block * ROWS + m)
        valid = row < tokens
    else:
        row = m
        theirs = tl.load(slots + m, mask=m < tokens, other=-1)
        if LEADING:
            slot = tl.load(slots + block)
            valid = theirs == slot
            slot = tl.where(tl.sum((valid & (m < block)).to(tl.int32), 0) > 0, -1, slot)
        else:
            valid = theirs == block
            slot = tl.where(tl.sum(valid.to(tl.int32), 0) > 0, block, -1)
    return slot.to(tl.int64), row.to(tl.int64), valid


@triton.jit(do_not_specialize=["tokens", "splits"], do_not_specialize_on_alignment=["slots"])
def _shrink(x, down, low, order, owner, slots, tokens, splits, x_t, INNER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SORTED: tl.constexpr, LEADING: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """`x · downᵀ` of a block's rows, over a split's inner numbers, into `low` [splits, tokens, WIDTH]; WIDTH: the ranks of all parts."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    tile, split = tl.program_id(0), tl.program_id(2)
    slot, row, valid = _mine(order, owner, slots, tokens, ROWS, SORTED, LEADING)
    if slot < 0:
        return
    n, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    share = tl.cdiv(tl.cdiv(INNER, BLOCK_K), splits) * BLOCK_K
    begin = split * share
    end = tl.minimum(begin + share, INNER)
    a = x + row[:, None] * x_t + k[None, :]
    b = down + slot * (WIDTH * INNER) + n[None, :] * INNER + k[:, None]
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_K):
        left = tl.load(a + start, mask=valid[:, None] & (start + k < end)[None, :], other=0.0)
        right = tl.load(b + start, mask=(n < WIDTH)[None, :] & (start + k < end)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    place = low + (split.to(tl.int64) * tokens + row[:, None]) * WIDTH + n[None, :]
    tl.store(place, acc, mask=valid[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["tokens", "splits"], do_not_specialize_on_alignment=["slots"])
def _expand(low, up, out, order, owner, slots, tokens, splits, WIDTH: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
            PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SORTED: tl.constexpr,
            LEADING: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Some columns of one part; PARTS: (first tile, first column, columns) of each. What the splits found is summed in their order."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    tile = tl.program_id(0)
    slot, row, valid = _mine(order, owner, slots, tokens, ROWS, SORTED, LEADING)
    if slot < 0:
        return
    part, column, end = 0, 0, 0
    for index in tl.static_range(len(PARTS)):
        here = tile >= PARTS[index][0]
        part = tl.where(here, index, part)
        column = tl.where(here, PARTS[index][1] + (tile - PARTS[index][0]) * BLOCK_N, column)
        end = tl.where(here, PARTS[index][1] + PARTS[index][2], end)
    n, r = column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    a = low + row[:, None] * WIDTH + part * RANK + r[None, :]
    b = up + slot * (RANK * COLUMNS) + r[:, None] * COLUMNS + n[None, :]
    step = tokens.to(tl.int64) * WIDTH
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, RANK, BLOCK_R):
        ranks = start + r < RANK
        right = tl.load(b + start * COLUMNS, mask=ranks[:, None] & (n < end)[None, :], other=0.0)
        left = tl.zeros([ROWS, BLOCK_R], tl.float32)
        for split in range(splits):
            left += tl.load(a + start + split * step, mask=valid[:, None] & ranks[None, :], other=0.0)
        acc = tl.dot(left.to(right.dtype), right, acc, input_precision="ieee")
    place, there = out + row[:, None] * COLUMNS + n[None, :], valid[:, None] & (n < end)[None, :]
    tl.store(place, (tl.load(place, mask=there, other=0.0).to(tl.float32) + acc).to(out.dtype.element_ty), mask=there)


class LoraTile(NamedTuple):
    """How a call is cut.

    Attributes:
        rows: of a block. sorted: by adapter; else each program looks at all of them. blocks: of rows, at most.
        ranks, inner, splits: columns of a program of the product down, its inner numbers at a time, and programs that share them.
        columns, depth: of a program of the product up, and ranks at a time.
    """

    rows: int
    sorted: bool
    blocks: int
    ranks: int
    inner: int
    splits: int
    columns: int
    depth: int


def lora_tile(facts: LoraFacts, tokens: int) -> LoraTile:
    """By the number of rows and the sizes of the layer alone."""
    wide = facts.dtype == "float32"
    most = FEW_FLOAT32 if wide else FEW
    width, few = len(facts.parts) * facts.rank, tokens <= most
    mean = triton.next_power_of_2(max(tokens // facts.slots, 1))
    rows = max(triton.next_power_of_2(tokens), 16) if few else min(max(mean, 16), most)
    blocks = min(tokens, facts.slots) if few else min(tokens, facts.slots + tokens // rows)
    ranks = min(max(triton.next_power_of_2(width), 16), 32 if wide else 64 if few else 128)
    inner = 32 if wide else 128 if few else 64
    programs = triton.cdiv(width, ranks) * blocks
    splits = max(min(2 * PROGRAMS // programs, triton.cdiv(facts.in_features, 2 * inner), SPLITS), 1)
    columns = 32 if wide else 64 if triton.cdiv(facts.out_features, 128) * blocks < PROGRAMS else 128
    depth = min(max(triton.next_power_of_2(facts.rank), 16), 32 if wide else 64)
    return LoraTile(rows, not few, blocks, ranks, inner, splits, columns, depth)


class LoraDelta(PlainKernel):
    """`run(out, x, down, up, slots)`, as in `ops.lora.LoraDeltaReference`."""

    facts: LoraFacts

    def run(self, out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor) -> None:
        facts, tokens = self.facts, x.shape[0]
        if tokens == 0:
            return
        tile, width = lora_tile(facts, tokens), len(facts.parts) * facts.rank
        x, slots = x if x.stride(-1) == 1 else x.contiguous(), slots.contiguous()
        order, owner = sorted_blocks(slots, facts.slots, 0, tile.rows) if tile.sorted else (slots, slots)
        low = torch.empty(tile.splits, tokens, width, dtype=torch.float32, device=x.device)
        of = {"WIDTH": width, "ROWS": tile.rows, "SORTED": tile.sorted, "LEADING": tokens <= facts.slots, "num_warps": 4, **early(x.device)}
        nbytes = x.element_size()
        _shrink[(triton.cdiv(width, tile.ranks), tile.blocks, tile.splits)](
            x, down, low, order, owner, slots, tokens, tile.splits, x.stride(0), INNER=facts.in_features, BLOCK_N=tile.ranks,
            BLOCK_K=tile.inner, num_stages=fitting_stages(x.device, 4, (tile.rows + tile.ranks) * tile.inner * nbytes), **of,
        )  # fmt: skip
        parts, tiles = _tiles(facts.parts, tile.columns)
        _expand[(tiles, tile.blocks)](
            low, up, out, order, owner, slots, tokens, tile.splits, RANK=facts.rank, COLUMNS=facts.out_features, PARTS=parts,
            BLOCK_N=tile.columns, BLOCK_R=tile.depth, num_stages=fitting_stages(x.device, 2, tile.depth * tile.columns * nbytes), **of,
        )  # fmt: skip


def _tiles(parts: tuple[int, ...], columns: int) -> tuple[Any, int]:
    """(first tile, first column, columns) of each part, and the number of tiles."""
    found, tile, column = [], 0, 0
    for part in parts:
        found.append((tile, column, part))
        tile, column = tile + triton.cdiv(part, columns), column + part
    return tuple(found), tile
