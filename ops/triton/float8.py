"""Float8 where Triton has no such type (NVIDIA before sm89): bytes made numbers and back by arithmetic of their bits.

A format is named by the bits of its fraction: 3 for e4m3fn, 2 for e5m2. Both have a sign, and the exponent the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from pagoda.ops.triton.launch import lacks_float8


def as_stored(pages: torch.Tensor) -> torch.Tensor:
    """Pages as kernels take them: those of float8 as bytes where the device's Triton has no float8."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn and lacks_float8(pages.device) else pages


@triton.jit
def decoded(code, FRACTION: tl.constexpr):
    """Bytes as float16, which holds every one of them; infinities and NaN too."""
    bits = code.to(tl.uint16)
    if FRACTION == 2:  # the upper half of a float16
        return (bits << 8).to(tl.float16, bitcast=True)
    size = bits & 0x7F
    wide = ((bits & 0x80) << 8) | tl.where(size == 0x7F, size << 8, size << 7)
    # The exponent's bias is 8 less than float16's. A product makes that good, and what has no leading bit gets one on the way.
    return wide.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def encoded(value, FRACTION: tl.constexpr):
    """Float32 numbers as bytes: the nearest, the even one at a tie; what is too large becomes the largest, and NaN stays NaN."""
    bias: tl.constexpr = 7 if FRACTION == 3 else 15
    largest: tl.constexpr = 0x7E if FRACTION == 3 else 0x7B
    away: tl.constexpr = 23 - FRACTION
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Half of the last bit that stays, less one unless that bit is odd, carries over where it must; then the exponent gets its bias.
    code = ((size + ((1 << (away - 1)) - 1) + ((size >> away) & 1)) >> away) - ((127 - bias) << FRACTION)
    # Below the smallest exponent steps are equal: float32 rounds to whole ones where its last bit is worth one.
    steps = size.to(tl.float32, bitcast=True) * (1 << (bias - 1 + FRACTION)) + 8388608.0
    code = tl.where(size < ((128 - bias) << 23), steps.to(tl.uint32, bitcast=True) - 0x4B000000, code)
    code = tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, largest))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def numbers(tile, dtype: tl.constexpr):
    """What pages hold, in `dtype`."""
    if tile.dtype == tl.uint8:
        tile = decoded(tile, 3)
    return tile.to(dtype)


@triton.jit
def stored(value, pages, FLOAT8: tl.constexpr):
    """Numbers as pages hold them: in float8 what is too large becomes the largest."""
    if pages.dtype.element_ty == tl.uint8:
        return encoded(value.to(tl.float32), 3)
    if FLOAT8:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -448.0), 448.0)
    return value.to(pages.dtype.element_ty)
