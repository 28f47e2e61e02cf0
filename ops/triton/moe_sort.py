"""Choices of experts in the order of their expert, in blocks of rows that belong to one: one launch for few choices, two for many.

Nothing depends on how many choices an expert got: sizes are upper bounds, blocks that there are not belong to expert −1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last

PAIRS = 4096
"""Choices that the kernel for few looks at in one go, and the most that are few."""
CHUNK, PART = 512, 128
"""Choices of a program of the kernels for many, and of those that are placed at once."""


@triton.jit(do_not_specialize=["pairs", "first", "blocks"], do_not_specialize_on_alignment=["ids"])
def _sort(ids, order, owner, pairs, first, blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
          ROWS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Program e writes the choices of expert e, in order, padded with `pairs` to whole blocks; `owner` gets each block's expert."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, BLOCK):
        mine, local = _chosen(ids, start + tl.arange(0, BLOCK), pairs, first, EXPERTS)
        counts += tl.histogram(mine, BINS, mask=local)
    padded = (counts + ROWS - 1) // ROWS * ROWS
    offset = tl.sum(tl.where(bins < expert, padded, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    size = tl.sum(tl.where(bins == expert, padded, 0), 0)
    done = offset
    for start in range(0, pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        mine, local = _chosen(ids, pair, pairs, first, EXPERTS)
        here = (local & (mine == expert)).to(tl.int32)
        tl.store(order + done + tl.cumsum(here, 0) - 1, pair, mask=here > 0)
        done += tl.sum(here, 0)
    _blocks(order, owner, expert, offset, count, size, pairs, ROWS)
    if expert == EXPERTS - 1:
        _nobody(owner, (offset + size) // ROWS, blocks)


@triton.jit
def _chosen(ids, pair, pairs, first, EXPERTS: tl.constexpr):
    """The expert of each choice, counted from this rank's first, and whether it is one of this rank's; 0 where it is not."""
    mine = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32) - first
    local = (pair < pairs) & (mine >= 0) & (mine < EXPERTS)
    return tl.where(local, mine, 0), local


@triton.jit
def _blocks(order, owner, expert, offset, count, size, pairs, ROWS: tl.constexpr):
    """What is left of an expert's last block, and whose its blocks are."""
    spare = tl.arange(0, ROWS)
    tl.store(order + offset + count + spare, tl.zeros([ROWS], tl.int32) + pairs, mask=count + spare < size)
    for block in range(offset // ROWS, (offset + size) // ROWS):
        tl.store(owner + block, expert)


@triton.jit
def _nobody(owner, used, blocks):
    """The blocks beyond the last belong to nobody."""
    for block in range(used, blocks):
        tl.store(owner + block, -1)


@triton.jit(do_not_specialize=["pairs", "first"], do_not_specialize_on_alignment=["ids"])
def _count(ids, counts, pairs, first, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """How often each expert was chosen in a chunk, `[chunks, BINS]`."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    chunk = tl.program_id(0)
    mine, local = _chosen(ids, chunk * CHUNK + tl.arange(0, CHUNK), pairs, first, EXPERTS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(mine, BINS, mask=local))


@triton.jit(do_not_specialize=["pairs", "first", "blocks", "chunks"], do_not_specialize_on_alignment=["ids"])
def _place(ids, counts, order, owner, pairs, first, blocks, chunks, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
           PART: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """A chunk's choices go behind those of the same expert in chunks before it."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    chunk, bins, few = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, 16)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, chunks, 16):
        other = start + few
        found = tl.load(counts + other[:, None] * BINS + bins[None, :], mask=(other < chunks)[:, None], other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((other < chunk)[:, None], found, 0), 0)
    padded = (total + ROWS - 1) // ROWS * ROWS
    offset = tl.cumsum(padded, 0) - padded
    free = offset + before
    each = tl.arange(0, PART)
    for start in range(0, CHUNK, PART):
        pair = chunk * CHUNK + start + each
        mine, local = _chosen(ids, pair, pairs, first, EXPERTS)
        earlier = (mine[:, None] == mine[None, :]) & (each[:, None] > each[None, :]) & local[None, :]
        place = tl.gather(free, mine, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order + place, pair, mask=local)
        free += tl.histogram(mine, BINS, mask=local)
    for expert in range(chunk, EXPERTS, chunks):
        here = bins == expert
        begin, count = tl.sum(tl.where(here, offset, 0), 0), tl.sum(tl.where(here, total, 0), 0)
        _blocks(order, owner, expert, begin, count, tl.sum(tl.where(here, padded, 0), 0), pairs, ROWS)
    if chunk == 0:
        _nobody(owner, tl.sum(padded, 0) // ROWS, blocks)


def sort_choices(facts: MoeMlpFacts, ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices by expert in blocks of `rows`, and the expert of each block that there can be, −1 for those that there are not."""
    return sorted_blocks(ids, facts.local or facts.experts, facts.first, rows)


def sorted_blocks(ids: torch.Tensor, local: int, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of `ids` in the order of their id, `local` of them from `first` on and no others, in blocks of `rows` padded with the number
    of places; and the id of each block that there can be, counted from `first`, −1 for those that there are not."""
    pairs = ids.numel()
    blocks = min(pairs, local + pairs // rows)
    order = torch.empty(blocks * rows, dtype=torch.int32, device=ids.device)
    owner = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    bins = max(triton.next_power_of_2(local), 2)
    sizes = {"EXPERTS": local, "BINS": bins, "num_warps": 4, **early(ids.device)}
    if pairs <= PAIRS:
        block = min(PAIRS, max(128, triton.next_power_of_2(pairs)))
        _sort[(local,)](ids, order, owner, pairs, first, blocks, BLOCK=block, ROWS=rows, **sizes)
        return order, owner
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    _count[(chunks,)](ids, counts, pairs, first, CHUNK=CHUNK, **sizes)
    _place[(chunks,)](ids, counts, order, owner, pairs, first, blocks, chunks, CHUNK=CHUNK, PART=PART, ROWS=rows, **sizes)
    return order, owner
