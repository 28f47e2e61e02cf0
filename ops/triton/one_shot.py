"""Sums over the ranks of one host in one kernel: each writes its part where the others reach it, waits for theirs and adds all of them.

Also joined with the residual addition and RMSNorm behind it. For messages so small that a library's steps one after the other, and not the
links, take the time. Every rank adds in rank order, in float32, and rounds once: all have the same bits, whatever the batch.

**The memory.** Each rank has one `Region` that all others have mapped: signals, then the parts of two calls. Program b of a call meets
only program b of the others, and has a place of its own: `signals[b, r]` is the last of b's calls for which rank r's part is there. Parts
of calls that follow each other lie in different halves. The half of call n is written again in call n + 2, which begins when n + 1 has
ended here, hence when the others had begun n + 1 and so ended n: nobody still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from pagoda.ops.triton.launch import early
from pagoda.ops.triton.order import let_next_start, wait_for_last
from pagoda.ops.triton.pointwise import rms_normed

PROGRAMS = 128
"""At most; all of them run at once on every processor that has ranks, since each waits for its like."""
SHARE = 32 << 10
"""Bytes that a program adds at most."""
TILE = 2048
"""Numbers at a time."""
MOST_BYTES = 4 << 20
"""What a rank reads of the others in all: above, a reduction in two steps, each with the world's part of it, is the library's to do. Not
measured: 4 MiB take 9 µs at 450 GB/s, as long as a collective of NCCL takes at least."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BEYOND = 1 << 62
"""A number that no count of calls reaches: whoever waits goes on."""


def region_bytes(world: int) -> int:
    """Size of a rank's region."""
    return _signal_bytes(world) + 2 * PROGRAMS * SHARE


def _signal_bytes(world: int) -> int:
    return 8 * PROGRAMS * world


@dataclass(frozen=True)
class Region:
    """What the ranks share. All begins as zeros.

    Attributes:
        maps: uint8 `[region_bytes(world)]` of each rank, as this process reaches it; they live as long as this does.
        peers: int64 `[world]`, on the device: their addresses.
        calls: int64 `[PROGRAMS]`, on the device: each program's calls so far.
    """

    rank: int
    maps: tuple[torch.Tensor, ...]
    peers: torch.Tensor
    calls: torch.Tensor

    @classmethod
    def over(cls, rank: int, maps: Sequence[torch.Tensor]) -> Region:
        """Of memory that is mapped."""
        device = maps[rank].device
        peers = torch.tensor([one.data_ptr() for one in maps], device=device)
        return cls(rank, tuple(maps), peers, torch.zeros(PROGRAMS, dtype=torch.int64, device=device))

    @property
    def world(self) -> int:
        return len(self.maps)

    def release(self) -> None:
        """Let whoever waits here go, now and later, by another stream than theirs: a rank is gone, and sums are worth nothing any more.

        By a copy, since a kernel that is used for the first time may only be loaded when those that wait have ended.
        """
        signals = self.maps[self.rank][: _signal_bytes(self.world)].view(torch.int64)
        signals.copy_(torch.full_like(signals, BEYOND, device="cpu"))

    def fits(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` takes x."""
        nbytes = x.nbytes
        return x.dtype in DTYPES and x.is_contiguous() and 0 < nbytes <= PROGRAMS * SHARE and nbytes * (self.world - 1) <= MOST_BYTES

    def fits_rows(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce_add_norm` takes x `[T, width]`: programs have whole rows."""
        return self.fits(x) and x.dim() == 2 and triton.cdiv(x.shape[0], PROGRAMS) * x.shape[1] * x.itemsize <= SHARE

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; returns x. Of what `fits`."""
        tiles = triton.cdiv(x.numel(), TILE)
        each = triton.cdiv(tiles, PROGRAMS) * TILE
        _all_reduce[(triton.cdiv(x.numel(), each),)](
            x, self.peers, self.calls, x.numel(), each, RANK=self.rank, WORLD=self.world, TILE=TILE,
            SIGNALS=_signal_bytes(self.world), SHARE=SHARE, PROGRAMS=PROGRAMS, num_warps=8, **early(x.device, 1),
        )  # fmt: skip
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(Σ x + residual), Σ x + residual), the norm as `ops.norm.AddRmsNormReference` has it, and the sum rounded to the dtype
        before it is added, as `all_reduce` leaves it. x, residual `[T, width]`, contiguous, of what `fits_rows`."""
        out, total = torch.empty_like(x), torch.empty_like(x)
        rows, width = x.shape
        each, block = triton.cdiv(rows, PROGRAMS), triton.next_power_of_2(width)
        _all_reduce_add_norm[(triton.cdiv(rows, each),)](
            x, residual, x if weight is None else weight, out, total, self.peers, self.calls, rows, each, eps, offset,
            RANK=self.rank, WORLD=self.world, WIDTH=width, BLOCK=block, WEIGHT=weight is not None, OFFSET=offset != 0.0,
            SIGNALS=_signal_bytes(self.world), SHARE=SHARE, PROGRAMS=PROGRAMS,
            num_warps=min(max(block // 512, 1), 8), **early(x.device, rows),
        )  # fmt: skip
        return out, total


@triton.jit
def _part(x, peers, rank, program, call, SIGNALS: tl.constexpr, SHARE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Where a rank's program has its part of a call."""
    address = tl.load(peers + rank) + SIGNALS + ((call & 1) * PROGRAMS + program) * SHARE
    return tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)


@triton.jit
def _meet(peers, program, call, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Tell every rank that the part of this program is there, and wait until theirs are."""
    tl.debug_barrier()  # all of this program's numbers are written before one thread says so
    for rank in tl.static_range(WORLD):
        theirs = tl.load(peers + rank).to(tl.pointer_type(tl.int64))
        tl.atomic_max(theirs + program * WORLD + RANK, call, sem="release", scope="sys")  # what was released stays so
    mine = tl.load(peers + RANK).to(tl.pointer_type(tl.int64)) + program * WORLD
    for rank in tl.static_range(WORLD):
        while tl.atomic_add(mine + rank, 0, sem="acquire", scope="sys") < call:
            pass
    tl.debug_barrier()


@triton.jit
def _sum(x, peers, program, call, column, mask, WORLD: tl.constexpr, SIGNALS: tl.constexpr, SHARE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Over the ranks, of those numbers of this program's part."""
    total = tl.zeros(column.shape, tl.float32)
    for rank in tl.static_range(WORLD):
        part = _part(x, peers, rank, program, call, SIGNALS, SHARE, PROGRAMS)
        total += tl.load(part + column, mask=mask, other=0.0).to(tl.float32)
    return total.to(x.dtype.element_ty)


@triton.jit
def _all_reduce(x, peers, calls, numel, each, RANK: tl.constexpr, WORLD: tl.constexpr, TILE: tl.constexpr,
                SIGNALS: tl.constexpr, SHARE: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Programs of `each` numbers."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    mine = _part(x, peers, RANK, program, call, SIGNALS, SHARE, PROGRAMS)
    own = x + program * each
    for begin in range(0, each, TILE):
        column = begin + tl.arange(0, TILE)
        mask = program * each + column < numel
        tl.store(mine + column, tl.load(own + column, mask=mask), mask=mask)
    _meet(peers, program, call, RANK, WORLD)
    for begin in range(0, each, TILE):
        column = begin + tl.arange(0, TILE)
        mask = program * each + column < numel
        tl.store(own + column, _sum(x, peers, program, call, column, mask, WORLD, SIGNALS, SHARE, PROGRAMS), mask=mask)
    tl.store(calls + program, call)


@triton.jit(do_not_specialize=["rows"])
def _all_reduce_add_norm(x, residual, weight, out, total, peers, calls, rows, each, eps, offset, RANK: tl.constexpr, WORLD: tl.constexpr,
                         WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, SIGNALS: tl.constexpr,
                         SHARE: tl.constexpr, PROGRAMS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Programs of `each` rows."""
    let_next_start(EARLY)
    wait_for_last(EARLY)
    program = tl.program_id(0)
    call = tl.load(calls + program) + 1
    mine = _part(x, peers, RANK, program, call, SIGNALS, SHARE, PROGRAMS)
    column = tl.arange(0, BLOCK)
    for i in range(each):
        row = program * each + i
        mask = (column < WIDTH) & (row < rows)
        tl.store(mine + i * WIDTH + column, tl.load(x + row * WIDTH + column, mask=mask), mask=mask)
    _meet(peers, program, call, RANK, WORLD)
    for i in range(each):
        row = program * each + i
        mask = (column < WIDTH) & (row < rows)
        place = row * WIDTH + column
        value = _sum(x, peers, program, call, i * WIDTH + column, mask, WORLD, SIGNALS, SHARE, PROGRAMS)
        value += tl.load(residual + place, mask=mask, other=0.0)
        tl.store(total + place, value, mask=mask)
        normed = rms_normed(value, weight, column, column < WIDTH, eps, offset, WIDTH, WEIGHT, OFFSET)
        tl.store(out + place, normed.to(out.dtype.element_ty), mask=mask)
    tl.store(calls + program, call)
