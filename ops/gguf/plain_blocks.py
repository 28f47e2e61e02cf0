"""Decoders of the formats with one scale a block, and of the four-bit floats: blocks `[N, bytes]` uint8 → float32 `[N, elements]`."""

from __future__ import annotations

from functools import lru_cache

import torch
from pagoda.ops.gguf.bits import bits, half, nibbles, scaled, signed

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of a four-bit float, times two; the scales are stored halved to make up for it."""

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen uneven levels of IQ4_NL and IQ4_XS."""


def levels(index: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    """Look up `values` in float32."""
    return _table(values, index.device)[index.int()]


@lru_cache(maxsize=32)
def _table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept, because a graph that is being captured cannot copy from the host.
    return torch.tensor(values, dtype=torch.float32, device=device)


def q4_0(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * (nibbles(b[:, 2:], 16).float() - 8)


def q4_1(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * nibbles(b[:, 4:], 16).float() + half(b[:, 2:4])


def q5_0(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * (_five(b[:, 2:6], b[:, 6:]) - 16)


def q5_1(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * _five(b[:, 4:8], b[:, 8:]) + half(b[:, 2:4])


def q8_0(b: torch.Tensor) -> torch.Tensor:
    return signed(b[:, 2:]) * half(b[:, :2])


def q1_0(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * (2.0 * bits(b[:, 2:]).float() - 1.0)


def iq4_nl(b: torch.Tensor) -> torch.Tensor:
    return half(b[:, :2]) * levels(nibbles(b[:, 2:], 16), IQ4_LEVELS)


def mxfp4(b: torch.Tensor) -> torch.Tensor:
    exponent = b[:, :1].int()
    # Half of 2**(e - 127); the two smallest are subnormal.
    scale_bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return scale_bits.view(torch.float32) * levels(nibbles(b[:, 1:], 16), E2M1_DOUBLED)


def nvfp4(b: torch.Tensor) -> torch.Tensor:
    return scaled(_half_ue4m3(b[:, :4]), levels(nibbles(b[:, 4:], 8), E2M1_DOUBLED))


def _five(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    return (nibbles(low, 16) | (bits(high) << 4)).float()


def _half_ue4m3(b: torch.Tensor) -> torch.Tensor:
    exponent, mantissa = ((b >> 3) & 15).float(), (b & 7).float()
    normal = (1.0 + mantissa / 8.0) * torch.exp2(exponent - 7)
    value = torch.where(exponent == 0, mantissa * 2.0**-9, normal) * 0.5
    return torch.where(b == 0x7F, 0.0, value)
