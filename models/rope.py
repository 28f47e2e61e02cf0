"""Rotary positions as data: `Rope` and its scalings, and the frequencies that follow from them (arXiv:2104.09864)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeStyle = Literal["neox", "interleaved"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with the sequence once that exceeds `original` positions (NTK-aware). Depends on each request's length."""

    factor: float
    original: int


@dataclass(frozen=True)
class YarnScaling:
    """Interpolates slow dimensions, keeps fast ones (arXiv:2309.00071). `attention_factor` multiplies cos and sin."""

    factor: float
    original: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def yarn_attention_factor(factor: float, mscale: float | None = None, all_dim: float | None = None) -> float:
    """What multiplies cos and sin where the configuration does not say: 0.1 · ln(factor) + 1, or DeepSeek's quotient of two such."""

    def scaled(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return scaled(mscale) / scaled(all_dim) if mscale and all_dim else scaled(1.0)


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths above `original / low` are stretched by `factor`, those below `original / high` kept."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class LongRopeScaling:
    """A factor per dimension, `short` up to `original` positions, `long` above (arXiv:2402.13753). Depends on each request's length."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float

    @staticmethod
    def default_factor(factor: float, original: int) -> float:
        """What multiplies cos and sin where the configuration does not say."""
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


Scaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotate the first `dims` numbers of each head by position · theta^(−2i / dims).

    sections: of tokens with a position for time, height and width, how many frequencies follow each, one after another or `woven` into one
    another.
    """

    theta: float
    dims: int
    style: RopeStyle = "neox"
    scaling: Scaling | None = None
    sections: tuple[int, ...] = ()
    woven: bool = False

    @property
    def by_length(self) -> bool:
        """Whether a request's angles change as it grows."""
        return isinstance(self.scaling, DynamicScaling | LongRopeScaling)

    @property
    def factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling | LongRopeScaling) else 1.0


def frequencies(rope: Rope, device: torch.device | str = "cpu") -> torch.Tensor:
    """Radians per position, `[dims / 2]` float32; of length-dependent scalings those of a short request."""
    plain = _plain(rope.theta, rope.dims, device)
    match rope.scaling:
        case None | DynamicScaling():
            return plain
        case LinearScaling(factor):
            return plain / factor
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case LongRopeScaling(short=short):
            return plain / torch.tensor(short, dtype=torch.float32, device=device)


def length_constants(rope: Rope, device: torch.device | str) -> torch.Tensor:
    """What `frequencies_by_length` needs besides lengths, made once: a captured step may not copy from the host."""
    match rope.scaling:
        case LongRopeScaling(short, long):
            return _plain(rope.theta, rope.dims, device) / torch.tensor((short, long), dtype=torch.float32, device=device)
        case _:
            return _exponents(rope.dims, device)


def frequencies_by_length(rope: Rope, lengths: torch.Tensor, constants: torch.Tensor | None = None) -> torch.Tensor:
    """lengths `[T]` → radians per position `[T, dims / 2]`, for the scalings that depend on it."""
    constants = length_constants(rope, lengths.device) if constants is None else constants
    match rope.scaling:
        case LongRopeScaling(original=original):
            return constants[(lengths > original).long()]
        case DynamicScaling(factor, original):
            grown = (factor * lengths.clamp(min=original).float() / original) - (factor - 1)
            base = rope.theta * grown ** (rope.dims / (rope.dims - 2))
            return base[:, None] ** -constants
        case _:
            raise AssertionError(f"{rope} does not depend on length")


def _exponents(dims: int, device: torch.device | str) -> torch.Tensor:
    return torch.arange(0, dims, 2, dtype=torch.float32, device=device) / dims


def _plain(theta: float, dims: int, device: torch.device | str) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(dims, device))


def _yarn(plain: torch.Tensor, rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    low, high = _yarn_range(rope, scaling)
    index = torch.arange(rope.dims // 2, dtype=torch.float32, device=plain.device)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_range(rope: Rope, scaling: YarnScaling) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        return rope.dims * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    return low, high if high != low else high + 0.001


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original * plain / (2 * math.pi)
    smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return plain / scaling.factor * (1 - smooth) + plain * smooth


class RopeTable:
    """cos and sin of one rope for the positions of a step, looked up once for all layers that share it.

    Args:
        positions: rows of the table; a rope that depends on length has none and is computed.
    """

    def __init__(self, rope: Rope, positions: int, device: torch.device) -> None:
        self._rope = rope
        self._table: torch.Tensor | None = None
        self._constants = length_constants(rope, device) if rope.by_length else None
        self._axes = _axes_of(rope).to(device) if rope.sections else None
        if not rope.by_length:
            angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies(rope))
            self._table = (torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.factor).to(device)

    @property
    def by_length(self) -> bool:
        return self._table is None

    def at(self, positions: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """positions `[T]` or `[axes, T]`, lengths `[T]` of each token's request (where needed) → cos, sin `[T, dims / 2]` float32."""
        if positions.dim() > 1 and self._axes is None:
            positions = positions[0]
        if self._table is not None:
            cos, sin = self._table[positions].chunk(2, dim=-1)
            if positions.dim() > 1:
                assert self._axes is not None
                chosen = self._axes.expand(1, cos.shape[1], -1)
                cos, sin = cos.gather(0, chosen)[0], sin.gather(0, chosen)[0]
            return cos, sin
        assert lengths is not None
        angles = positions[:, None].float() * frequencies_by_length(self._rope, lengths, self._constants)
        return angles.cos() * self._rope.factor, angles.sin() * self._rope.factor


def _axes_of(rope: Rope) -> torch.Tensor:
    """Which position each frequency follows, `[dims / 2]`; woven: of every three one after another, until a section is used up."""
    if not rope.woven:
        return torch.arange(len(rope.sections)).repeat_interleave(torch.tensor(rope.sections))
    axes = torch.zeros(rope.dims // 2, dtype=torch.int64)
    for axis in range(1, len(rope.sections)):
        axes[axis : rope.sections[axis] * len(rope.sections) : len(rope.sections)] = axis
    return axes
