"""Bit fields of a block's bytes, as the decoders read them. `b [N, k]` uint8 throughout; no byte order of the host matters."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def half(b: torch.Tensor) -> torch.Tensor:
    """`[N, 2k]` → float32 `[N, k]`: little-endian float16."""
    return u16(b).to(torch.int16).view(torch.float16).float()


def u16(b: torch.Tensor) -> torch.Tensor:
    """`[N, 2k]` → int32 `[N, k]` in 0 … 65535."""
    pairs = b.unflatten(-1, (-1, 2)).int()
    return pairs[..., 0] | (pairs[..., 1] << 8)


def u32(b: torch.Tensor) -> torch.Tensor:
    """`[N, 4k]` → int64 `[N, k]` in 0 … 2³²-1."""
    quads = b.unflatten(-1, (-1, 4)).long()
    return quads[..., 0] | (quads[..., 1] << 8) | (quads[..., 2] << 16) | (quads[..., 3] << 24)


def signed(b: torch.Tensor) -> torch.Tensor:
    """uint8 bytes read as int8, in float32."""
    return b.view(torch.int8).float()


def fields(b: torch.Tensor, shifts: Sequence[int], mask: int, span: int) -> torch.Tensor:
    """Cut `[N, k]` into runs of `span`; each run gives `len(shifts)` runs of `(run >> shift) & mask`: `[N, k * len(shifts)]`.

    This is how ggml lays out its fields: all low nibbles of a run, then all its high nibbles.
    """
    runs = b.unflatten(-1, (-1, span))
    return torch.stack([(runs >> shift) & mask for shift in shifts], -2).flatten(1)


def nibbles(b: torch.Tensor, span: int) -> torch.Tensor:
    """Low, then high nibbles of each run of `span` bytes."""
    return fields(b, (0, 4), 15, span)


def bits(b: torch.Tensor) -> torch.Tensor:
    """`[N, k]` → `[N, 8k]` in 0 … 1, lowest bit first."""
    return fields(b, range(8), 1, 1)


def signs(bit: torch.Tensor) -> torch.Tensor:
    """1 where the bit is 0, -1 where it is 1, in float32."""
    return 1.0 - 2.0 * bit.float()


def parity_signs(index: torch.Tensor) -> torch.Tensor:
    """7-bit `index […]` → eight signs `[…, 8]`; the eighth makes the number of minus signs even."""
    seven = (index.unsqueeze(-1) >> torch.arange(7, device=index.device)) & 1
    return signs(torch.cat([seven, seven.sum(-1, keepdim=True) & 1], -1))


def scaled(d: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Multiply each of `q [N, k]`'s equal runs by its own scale `d [N, r]`."""
    return (q.unflatten(-1, (d.shape[-1], -1)) * d.unsqueeze(-1)).flatten(1)
