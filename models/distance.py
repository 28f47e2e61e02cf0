"""Learned biases by the distance between two tokens, in buckets that widen with it (T5, arXiv:1910.10683)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distances:
    """`buckets` for all distances, from `far` on the last one; where a token sees what comes later, half of them are for that.

    `own`: each layer has a table of its own; otherwise all share one.
    """

    buckets: int
    far: int
    own: bool = False


def distance_bias(distances: Distances, table: torch.Tensor) -> torch.Tensor:
    """Both directions: table `[buckets, H]` → `[H, 2 · far + 1]`, the number for j − i at j − i + far; beyond, the outermost ones."""
    away = torch.arange(-distances.far, distances.far + 1)
    half = distances.buckets // 2
    return table[(_bucket(away.abs(), half, distances.far) + half * (away > 0)).to(table.device)].t().contiguous()


def backward_bias(distances: Distances, table: torch.Tensor) -> torch.Tensor:
    """Backwards only: table `[buckets, H]` → `[H, far + 1]`, the number for i − j; beyond, the last one."""
    away = torch.arange(distances.far + 1)
    return table[_bucket(away, distances.buckets, distances.far).to(table.device)].t().contiguous()


def _bucket(distance: torch.Tensor, buckets: int, far: int) -> torch.Tensor:
    exact = buckets // 2
    widening = torch.log(distance.clamp(min=1).float() / exact) / math.log(far / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + widening.long()).clamp(max=buckets - 1))
