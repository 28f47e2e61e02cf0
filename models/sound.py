"""The way from sound into an encoder, as data: convolutions over time, then positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.models.positions import Learned, Sinusoids


@dataclass(frozen=True)
class TimeConv:
    """A convolution over frames or samples to `width` numbers, then an activation ("glu": half of them gate the other half). `normed`: by
    the statistic of all numbers of an input."""

    width: int
    kernel: int
    stride: int
    padding: int = 0
    activation: Literal["gelu", "tanh", "glu"] = "gelu"
    bias: bool = True
    normed: bool = False


@dataclass(frozen=True)
class Sound:
    """`bins` numbers a frame (0: the sound's own samples) through `convs`; times `scale`, plus positions. `log_mel`: frames are spectra of
    Whisper's kind."""

    bins: int
    convs: tuple[TimeConv, ...]
    positions: Learned | Sinusoids | None = None
    scale: float = 1.0
    log_mel: bool = False
