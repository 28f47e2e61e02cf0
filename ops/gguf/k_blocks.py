"""Decoders of the K and ternary formats, super-blocks of 256: blocks `[N, bytes]` uint8 → float32 `[N, 256]`."""

from __future__ import annotations

import torch
from pagoda.ops.gguf.bits import fields, half, nibbles, scaled, signed, u32

TWO_BITS = (0, 2, 4, 6)


def q2_k(b: torch.Tensor) -> torch.Tensor:
    scales, d, dmin = b[:, :16], half(b[:, 80:82]), half(b[:, 82:84])
    q = fields(b[:, 16:80], TWO_BITS, 3, 32).float()
    return _affine(d * (scales & 15).float(), q, dmin * (scales >> 4).float())


def q3_k(b: torch.Tensor) -> torch.Tensor:
    high = fields(b[:, :32], range(8), 1, 32).float()
    low = fields(b[:, 32:96], TWO_BITS, 3, 32).float()
    packed = b[:, 96:108]
    scales = nibbles(packed[:, :8], 8) | (fields(packed[:, 8:], TWO_BITS, 3, 4) << 4)
    # A set mask bit means that 4 is not subtracted.
    return scaled(half(b[:, 108:]) * (scales.float() - 32), low - 4 * (1 - high))


def q4_k(b: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(b)
    return _affine(scales, nibbles(b[:, 16:], 32).float(), mins)


def q5_k(b: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(b)
    high = fields(b[:, 16:48], range(8), 1, 32)
    return _affine(scales, (nibbles(b[:, 48:], 32) | (high << 4)).float(), mins)


def q6_k(b: torch.Tensor) -> torch.Tensor:
    low = nibbles(b[:, :128], 64)
    high = fields(b[:, 128:192], TWO_BITS, 3, 32)
    return scaled(half(b[:, 208:]) * signed(b[:, 192:208]), (low | (high << 4)).float() - 32)


def q8_k(b: torch.Tensor) -> torch.Tensor:
    return u32(b[:, :4]).int().view(torch.float32) * signed(b[:, 4:260])


def tq1_0(b: torch.Tensor) -> torch.Tensor:
    digits = torch.cat([_trits(b[:, :32], 5, 32), _trits(b[:, 32:48], 5, 16), _trits(b[:, 48:52], 4, 4)], -1)
    return half(b[:, 52:]) * (digits - 1)


def tq2_0(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, 64:]) * (fields(b[:, :64], TWO_BITS, 3, 32).float() - 1)


def _affine(scales: torch.Tensor, q: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
    runs = q.unflatten(-1, (scales.shape[-1], -1))
    return (scales.unsqueeze(-1) * runs - mins.unsqueeze(-1)).flatten(1)


def _scales_and_mins(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight six-bit scales and minima from twelve bytes; the upper four of each are split over two places."""
    first, second, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], -1)
    mins = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], -1)
    return half(b[:, :2]) * scales.float(), half(b[:, 2:4]) * mins.float()


def _trits(b: torch.Tensor, count: int, span: int) -> torch.Tensor:
    """Base-3 digits held as the fraction of a byte: multiply by 3ⁿ modulo 256, the digit is what then crosses 256 / 3."""
    runs = b.unflatten(-1, (-1, span)).int()
    return torch.stack([(((runs * 3**n) & 255) * 3) >> 8 for n in range(count)], -2).flatten(1).float()
