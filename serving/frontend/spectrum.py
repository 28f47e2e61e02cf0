"""The spectrum that Whisper's encoders read: 10 ms a frame, power in mel bands, its logarithm (arXiv:2212.04356)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RATE, HOP, WIDTH = 16000, 160, 400
"""Samples a second, between two frames, and of a frame."""

Samples = NDArray[np.float32]


def log_mel(samples: Samples, bins: int, frames: int) -> NDArray[np.float32]:
    """`[bins, frames]` of at most `frames` · HOP samples at RATE; silence fills what lacks."""
    wave = np.zeros(frames * HOP, np.float32)
    wave[: len(samples)] = samples
    padded = np.pad(wave, WIDTH // 2, mode="reflect")
    cut = np.lib.stride_tricks.sliding_window_view(padded, WIDTH)[::HOP][:frames]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WIDTH) / WIDTH)
    power = np.abs(np.fft.rfft(cut * window)) ** 2
    logs = np.log10(np.maximum(power @ mel_bands(bins), 1e-10))
    made: NDArray[np.float32] = ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).T.astype(np.float32)
    return np.ascontiguousarray(made)


@lru_cache
def mel_bands(bins: int) -> NDArray[np.float64]:
    """`[WIDTH / 2 + 1, bins]`: triangles of equal area between points at equal steps of Slaney's mel scale, from 0 to RATE / 2 Hz."""
    points = _hertz(np.linspace(0.0, _mel(RATE / 2), bins + 2))
    lines = np.linspace(0.0, RATE / 2, WIDTH // 2 + 1)[:, None]
    low, middle, high = points[:-2], points[1:-1], points[2:]
    up, down = (lines - low) / (middle - low), (high - lines) / (high - middle)
    bands: NDArray[np.float64] = np.maximum(0.0, np.minimum(up, down)) * 2.0 / (high - low)
    return bands


_LINEAR = 200.0 / 3.0
_LOG_FROM = 1000.0
_LOG_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    return hertz / _LINEAR if hertz < _LOG_FROM else _LOG_FROM / _LINEAR + float(np.log(hertz / _LOG_FROM)) / _LOG_STEP


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    bend = _LOG_FROM / _LINEAR
    return np.where(mel < bend, mel * _LINEAR, _LOG_FROM * np.exp(_LOG_STEP * (mel - bend)))
