"""Decoders of the IQ formats, super-blocks of 256 from look-up grids: blocks `[N, bytes]` uint8 → float32 `[N, 256]`."""

from __future__ import annotations

from functools import lru_cache

import torch
from pagoda.ops.gguf.bits import bits, fields, half, nibbles, parity_signs, scaled, signs, u16, u32
from pagoda.ops.gguf.plain_blocks import IQ4_LEVELS, levels

DELTA = 0.125
"""Shift of the ternary grids of IQ1."""


@lru_cache(maxsize=32)
def grid(name: str, device: torch.device) -> torch.Tensor:
    """The look-up table of a format, float32 `[entries, 4 or 8]`; the numbers are the gguf package's."""
    from gguf import quants

    table = getattr(quants, name)
    table.init_grid()
    return torch.from_numpy(table.grid.reshape(table.grid_shape).copy()).to(device)


@lru_cache(maxsize=16)
def grid_of(kind: str) -> torch.Tensor | None:
    """The look-up table of an IQ format as int8 on the host, None for formats without one."""
    if not kind.startswith(("IQ1", "IQ2", "IQ3")):
        return None
    return grid("IQ1_S" if kind == "IQ1_M" else kind, torch.device("cpu")).round().to(torch.int8).contiguous()


def iq2_xxs(b: torch.Tensor) -> torch.Tensor:
    words = u32(b[:, 2:]).unflatten(-1, (8, 2))
    index = b[:, 2:].unflatten(-1, (8, 8))[..., :4].int()
    scale = half(b[:, :2]) * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    return scaled(scale, _look_up("IQ2_XXS", index) * _packed_signs(words[..., 1]))


def iq2_xs(b: torch.Tensor) -> torch.Tensor:
    codes = u16(b[:, 2:66])
    scale = half(b[:, :2]) * (0.5 + nibbles(b[:, 66:], 1).float()) * 0.25
    return scaled(scale, _look_up("IQ2_XS", codes & 511) * parity_signs(codes >> 9).flatten(1))


def iq2_s(b: torch.Tensor) -> torch.Tensor:
    index = b[:, 2:34].int() | (fields(b[:, 66:74], (0, 2, 4, 6), 3, 1).int() << 8)
    scale = half(b[:, :2]) * (0.5 + nibbles(b[:, 74:], 1).float()) * 0.25
    return scaled(scale, _look_up("IQ2_S", index) * signs(bits(b[:, 34:66])))


def iq3_xxs(b: torch.Tensor) -> torch.Tensor:
    words = u32(b[:, 66:])
    scale = half(b[:, :2]) * (0.5 + (words >> 28).float()) * 0.5
    return scaled(scale, _look_up("IQ3_XXS", b[:, 2:66].int()) * _packed_signs(words))


def iq3_s(b: torch.Tensor) -> torch.Tensor:
    index = b[:, 2:66].int() | (bits(b[:, 66:74]).int() << 8)
    scale = half(b[:, :2]) * (1 + 2 * nibbles(b[:, 106:], 1).float())
    return scaled(scale, _look_up("IQ3_S", index) * signs(bits(b[:, 74:106])))


def iq1_s(b: torch.Tensor) -> torch.Tensor:
    high = u16(b[:, 34:])
    index = b[:, 2:34].int() | (fields(high, (0, 3, 6, 9), 7, 1) << 8)
    scale = half(b[:, :2]) * (2 * ((high >> 12) & 7) + 1).float()
    return scaled(scale, _shifted("IQ1_S", index, (high >> 15) & 1))


def iq1_m(b: torch.Tensor) -> torch.Tensor:
    packed, high = u16(b[:, 48:]), nibbles(b[:, 32:48], 1)
    # The float16 scale lies in the four top nibbles of the scale words.
    first, second, third, fourth = (packed & 0xF000).unbind(-1)
    bits16 = (first >> 12) | (second >> 8) | (third >> 4) | fourth
    d = bits16.to(torch.int16).view(torch.float16).float().unsqueeze(-1)
    index = b[:, :32].int() | ((high & 7).int() << 8)
    scale = d * (2 * fields(packed, (0, 3, 6, 9), 7, 1) + 1).float()
    return scaled(scale, _shifted("IQ1_M", index, high >> 3))


def iq4_xs(b: torch.Tensor) -> torch.Tensor:
    high = fields(u16(b[:, 2:4]), range(0, 16, 2), 3, 1)
    scales = (nibbles(b[:, 4:8], 1).int() | (high << 4)).float() - 32
    return scaled(half(b[:, :2]) * scales, levels(nibbles(b[:, 8:], 16), IQ4_LEVELS))


def _look_up(name: str, index: torch.Tensor) -> torch.Tensor:
    return grid(name, index.device)[index.flatten(1)].flatten(1)


def _packed_signs(words: torch.Tensor) -> torch.Tensor:
    """Four seven-bit sign indices in the low 28 bits of each word."""
    return parity_signs(fields(words, (0, 7, 14, 21), 127, 1)).flatten(1)


def _shifted(name: str, index: torch.Tensor, minus: torch.Tensor) -> torch.Tensor:
    values = _look_up(name, index)
    return (values.unflatten(-1, (minus.shape[-1], -1)) + (DELTA * signs(minus)).unsqueeze(-1)).flatten(1)
