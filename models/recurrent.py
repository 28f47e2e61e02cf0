"""Mixers that keep a state instead of keys and values, as data: state spaces, delta rules, linear attention, short convolutions.

Sizes are those of the whole model, not of a rank. `numbers` is what one token takes inside the mixer at once, for the memory plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagoda.models.spec import Norm


@dataclass(frozen=True)
class Conv:
    """A causal depthwise convolution of `taps` weights a channel."""

    taps: int
    bias: bool = False


@dataclass(frozen=True)
class GatedNorm:
    """A norm of the mixer's output in `groups` equal parts, and a gate multiplied before it (`gate_first`) or after it.

    `shared`: the groups (heads) share one weight; otherwise each number has its own.
    """

    norm: Norm
    groups: int
    gate: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Selective:
    """Mamba (arXiv:2312.00752): `inner` channels with `state` numbers each; b, c and the step come from a projection of the channels.

    Attributes:
        heads: channels in so many parts, each with projections of its own (Zamba).
        inner_norm: of the step's latent, b and c; with weights (Jamba) or without (Falcon Mamba).
        bias: projections in and out have biases.
    """

    inner: int
    state: int
    step_rank: int
    conv: Conv
    heads: int = 1
    inner_norm: Norm | None = None
    bias: bool = False

    @property
    def numbers(self) -> int:
        return self.inner * (6 + 2 * self.state)


@dataclass(frozen=True)
class Ssd:
    """Mamba 2 (arXiv:2405.21060): `heads` of `head_dim` values, `groups` of them sharing b and c of `state` numbers.

    Attributes:
        step_limits: the step is clamped to them.
        norm: of the output, with the gate; None: the gate alone (silu).
        bias: projections in and out have biases.
        scales: multipliers of gate, x, b, c and step after the projection.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: Conv
    norm: GatedNorm | None
    step_limits: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    scales: tuple[float, float, float, float, float] | None = None

    @property
    def numbers(self) -> int:
        return 6 * self.heads * self.head_dim + 4 * self.groups * self.state


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule (arXiv:2412.06464): `heads` of `v_dim` values, `k_heads` of `k_dim` keys and queries, shared by neighbours.

    Attributes:
        norm: of each head's output, with the gate.
        double_beta: beta is in (0, 2), which allows negative eigenvalues (arXiv:2411.12537).
    """

    heads: int
    k_heads: int
    k_dim: int
    v_dim: int
    conv: Conv
    norm: GatedNorm
    double_beta: bool = False

    @property
    def numbers(self) -> int:
        return 6 * (self.heads * self.v_dim + self.k_heads * self.k_dim)


@dataclass(frozen=True)
class KimiDelta:
    """Kimi's delta rule (arXiv:2510.26692): each of `dim` key channels of a head decays by itself; decay and gate come through latents
    as wide as a head. `dim` is that of values too."""

    heads: int
    dim: int
    conv: Conv
    norm: GatedNorm

    @property
    def numbers(self) -> int:
        return 12 * self.heads * self.dim


@dataclass(frozen=True)
class Lightning:
    """Linear attention whose heads decay at fixed rates (arXiv:2501.08313): `rates` per head; q, k and v go through silu."""

    rates: tuple[float, ...]
    head_dim: int
    norm: GatedNorm

    @property
    def numbers(self) -> int:
        return 8 * len(self.rates) * self.head_dim


@dataclass(frozen=True)
class ShortConv:
    """A gated convolution over the layer's width (LFM 2): `out(c · conv(b · x))`."""

    conv: Conv
    bias: bool = False
    width: int = 0

    @property
    def numbers(self) -> int:
        return 5 * self.width


@dataclass(frozen=True)
class TimeMix:
    """RWKV's averages over time (arXiv:2305.13048): `inner` channels with a decay each. Keys, values and gates see blends of a token with
    the one before it."""

    inner: int

    @property
    def numbers(self) -> int:
        return 12 * self.inner


@dataclass(frozen=True)
class ChannelMix:
    """RWKV's feed-forward, `down(relu(up)²)` behind a gate as wide as the layer; up and gate see such blends too."""

    hidden: int

    @property
    def numbers(self) -> int:
        return 4 * self.hidden


Recurrent = Selective | Ssd | GatedDelta | KimiDelta | Lightning | ShortConv | TimeMix | ChannelMix
