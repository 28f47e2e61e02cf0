"""Gate, up and their activation in one Triton kernel for many rows: what the product makes never leaves the registers.

Weights lie as they do for every other way, gate's rows before up's. A descriptor of three dimensions brings a tile of both, one behind the
other in shared memory, so that one product makes both and each thread has both of a number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from pagoda.ops.triton.launch import describes, narrow_units, processors, shared_memory
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def activated(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["rows"])
def _gated(x, weight, out, rows, columns, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           GROUP: tl.constexpr):  # fmt: skip
    """Each program takes tile after tile, GROUP of them below each other before the next column, so that what they share is in cache.
    x: `[rows, INNER]`; weight: `[2, columns, INNER]`; out: `[rows, columns]`; all are descriptors, which end where their tensors do."""
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        band = tile // (GROUP * across)
        height = tl.minimum(down - band * GROUP, GROUP)
        row = (band * GROUP + tile % (GROUP * across) % height) * BLOCK_M
        column = tile % (GROUP * across) // height * BLOCK_N
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            right = weight.load([0, column, start]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x.load([row, start]), tl.trans(right), both)
        gate, up = tl.split(tl.permute(both.reshape(BLOCK_M, 2, BLOCK_N), 0, 2, 1))
        out.store([row, column], activated(gate, up).to(out.dtype))


class GatedCut(NamedTuple):
    """Rows, columns of gate and as many of up, and inner numbers of a tile; tiles below each other in the order."""

    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 3
    group: int = 16

    def tiles(self, rows: int, columns: int) -> int:
        return triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns)


LARGE, SMALL = GatedCut(), GatedCut(columns=64, warps=4, stages=4)
"""The faster one a number, and the one that leaves fewer processors without a tile where there are few."""
BUSY = 0.8
MANY = 512
"""From so many rows on the joined product is the faster one. With 256 it is, too, alone, and is not within a step."""


def gated_cut(rows: int, columns: int, programs: int) -> GatedCut:
    """The large tiles where they keep BUSY of the processors at work, the last turn counted.
    (`benchmarks/gpu_gated_gemm.py` measures both.)"""
    tiles = LARGE.tiles(rows, columns)
    return LARGE if tiles >= BUSY * programs * triton.cdiv(tiles, programs) else SMALL


def takes_gated(device: torch.device, dtype: torch.dtype, inner: int, columns: int) -> bool:
    """Whether the device can: descriptors' rows begin at multiples of 16 bytes, operands come from shared memory, three stages fit. On the
    host the interpreter shows that it is right, in float32."""
    fits = (inner * dtype.itemsize) % 16 == 0 and (columns * dtype.itemsize) % 16 == 0
    fits = fits and (dtype.itemsize == 2 or device.type == "cpu") and describes(device) and not narrow_units(device)
    return fits and shared_memory(device) >= max(_bytes(cut, dtype) for cut in (LARGE, SMALL))


def _bytes(cut: GatedCut, dtype: torch.dtype) -> int:
    stages = cut.stages * (cut.rows + 2 * cut.columns) * cut.inner
    return (stages + cut.rows * cut.columns) * dtype.itemsize + 1024


def gated_gemm(x: torch.Tensor, weight: torch.Tensor, cut: GatedCut | None = None) -> torch.Tensor:
    """`silu(x · gateᵀ) · (x · upᵀ)`, `[T, F]`, of x `[T, K]` and contiguous weight `[2 F, K]`, gate's rows first."""
    rows, inner, columns = x.shape[0], x.shape[1], weight.shape[0] // 2
    cut = cut or gated_cut(rows, columns, processors(x.device))
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    both = weight.view(2, columns, inner)
    described = [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
        for tensor, block in ((x, [cut.rows, cut.inner]), (both, [2, cut.columns, cut.inner]), (out, [cut.rows, cut.columns]))
    ]
    programs = min(processors(x.device), cut.tiles(rows, columns))
    _gated[(programs,)](
        *described, rows, columns, INNER=inner, BLOCK_M=cut.rows, BLOCK_N=cut.columns, BLOCK_K=cut.inner, GROUP=cut.group,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out
