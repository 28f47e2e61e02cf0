"""Absolute positions as a table: learned, or made of sines."""

from __future__ import annotations

import math

import torch
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.spec import Learned, Sinusoids


def position_table(build: Builder, path: str, spec: Learned | Sinusoids | None, width: int) -> torch.Tensor | None:
    """`[rows, width]`; what is learned is the tensor `path`."""
    if spec is None:
        return None
    if isinstance(spec, Learned):
        return build.tensor(path, (Span.whole(spec.rows), Span.whole(width)), "replicated")
    if not build.loading:
        return None
    return sinusoids(spec.rows, width, spec.reaching).to(build.torch_device, getattr(torch, build.numerics.dtype))


def sinusoids(rows: int, width: int, reaching: bool) -> torch.Tensor:
    """`[rows, width]` float32: sines in the first half, cosines in the second."""
    half = width // 2
    steps = half - 1 if reaching else half
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000.0) / steps))
    angles = torch.arange(rows, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    return torch.nn.functional.pad(table, (0, width - 2 * half))
