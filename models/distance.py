"""Learned biases by the distance between two tokens, in buckets that widen with it (T5, arXiv:1910.10683), for both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Distances:
    """`buckets` for all distances, half of them for tokens that come later; beyond `far` the last one. `longest`: of a prompt."""

    buckets: int
    far: int
    longest: int


def distance_bias(distances: Distances, table: torch.Tensor) -> torch.Tensor:
    """table `[buckets, H]` → `[H, 2L − 1]`, the number for j − i at j − i + L − 1."""
    away = torch.arange(1 - distances.longest, distances.longest)
    return table[_bucket(away, distances).to(table.device)].t().contiguous()


def _bucket(away: torch.Tensor, distances: Distances) -> torch.Tensor:
    half = distances.buckets // 2
    exact = half // 2
    distance = away.abs()
    widening = torch.log(distance.clamp(min=1).float() / exact) / math.log(distances.far / exact) * (half - exact)
    bucket = torch.where(distance < exact, distance, (exact + widening.long()).clamp(max=half - 1))
    return bucket + half * (away > 0)
