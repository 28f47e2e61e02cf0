"""From a sound to what an encoder reads; files are decoded by soundfile and resampled by soxr, both optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.models.encoding import EncoderFacts
from pagoda.serving.engine.messages import EncoderPrompt
from pagoda.serving.frontend.spectrum import HOP, RATE, Samples, log_mel

SEARCHED = 1.0
"""Seconds at the end of a window in which the quietest place to cut is looked for."""
LONGEST = 4 * 3600
"""Seconds of a sound."""
MOST_SAMPLES = 1 << 28
"""Of a sound, at its own rate."""
BLOCK = 1 << 20
"""Samples, of all channels, that are decoded at a time."""
QUIET = 400
"""Samples whose loudness is compared."""


class Piece(NamedTuple):
    """A part of a sound that fits the encoder, and where it begins, in seconds."""

    begin: float
    samples: Samples


def heard(sound: Any, facts: EncoderFacts) -> EncoderPrompt:
    """`sound`: (samples, rate), or an array as the encoder wants it: `[bins, frames]` (or turned) or `[samples]`."""
    if isinstance(sound, tuple):
        samples = resampled(np.asarray(sound[0], np.float32), int(sound[1]))
        if len(samples) > longest_sound(facts):
            most = longest_sound(facts) / RATE
            raise RequestError(f"the sound takes {len(samples) / RATE:.1f} s and the encoder hears {most:g} s: cut it", param="audio")
        return encoder_input(samples, facts)
    values = np.asarray(sound, np.float32)
    if values.ndim == 2 and values.shape[0] != facts.bins == values.shape[1]:
        values = values.T
    if values.ndim != (2 if facts.kind == "frames" else 1):
        raise RequestError(f"audio has {values.ndim} dimensions; give (samples, sampling rate)", param="audio")
    return as_input(values)


def as_input(values: NDArray[np.float32]) -> EncoderPrompt:
    if not np.isfinite(values).all():
        raise RequestError("the sound, or what its loudness comes to, holds numbers that are not finite", param="audio")
    return EncoderPrompt(features=values.astype("<f4").tobytes(), shape=tuple(values.shape))


def encoder_input(samples: Samples, facts: EncoderFacts) -> EncoderPrompt:
    """Of at most `longest_sound` samples at RATE."""
    if facts.kind == "samples":
        return as_input(samples)
    if not facts.log_mel:
        raise RequestError("this model's spectra are not made here: give them as an array [bins, frames]", param="audio")
    return as_input(log_mel(samples, facts.bins, facts.most))


def longest_sound(facts: EncoderFacts) -> int:
    """Samples at RATE that the encoder hears at a time."""
    return facts.most * (HOP if facts.kind == "frames" else 1)


def decoded(content: bytes) -> Samples:
    """The samples at RATE, one channel, of a file: wav, flac, ogg, mp3 and what else libsndfile reads."""
    if not content:
        raise RequestError("the file is empty; send a sound", param="file")
    soundfile = _package("soundfile")
    try:
        with soundfile.SoundFile(BytesIO(content)) as file:
            rate, frames = file.samplerate, file.frames
            _check_length(frames, rate)
            blocks = [block.mean(1) for block in file.blocks(BLOCK, dtype="float32", always_2d=True, frames=frames)]
    except soundfile.LibsndfileError as error:
        raise RequestError(f"the file cannot be decoded: {error}; send wav, flac, ogg or mp3", param="file") from None
    return resampled(np.concatenate([np.zeros(0, np.float32), *blocks]), rate)


def resampled(samples: Samples, rate: int) -> Samples:
    """At RATE; several channels `[samples, channels]` become their mean."""
    samples = samples.mean(1) if samples.ndim == 2 else samples
    _check_length(len(samples), rate)
    if not np.isfinite(samples).all():
        raise RequestError("the sound holds samples that are not finite", param="file")
    if rate == RATE:
        return samples
    made: Samples = _package("soxr").resample(samples, rate, RATE)
    return made.astype(np.float32)


def _check_length(samples: int, rate: int) -> None:
    """Before there is memory for them: a header may promise anything, and what is silent takes few bytes."""
    if not samples:
        raise RequestError("the sound has no samples; send a longer one", param="file")
    if rate < 1 or samples > rate * LONGEST or samples > MOST_SAMPLES:
        raise RequestError(f"the sound has {samples} samples at {rate} Hz; at most {LONGEST // 3600} hours are taken: cut it", param="file")


def pieces(samples: Samples, longest: int) -> Iterator[Piece]:
    """The sound in parts of at most `longest` samples, cut where it is quietest near their ends."""
    begin = 0
    while len(samples) - begin > longest:
        end = begin + _quietest(samples[begin : begin + longest], longest)
        yield Piece(begin / RATE, samples[begin:end])
        begin = end
    yield Piece(begin / RATE, samples[begin:])


def _quietest(window: Samples, longest: int) -> int:
    searched = window[-min(int(SEARCHED * RATE), longest // 4) :]
    whole = searched[: len(searched) // QUIET * QUIET].reshape(-1, QUIET)
    if not len(whole):
        return longest
    return len(window) - len(searched) + int((whole**2).sum(1).argmin()) * QUIET + QUIET // 2


def _package(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        raise ConfigError(f"sounds need the package {name}, which is not installed: pip install 'pagoda-llm[audio]'") from None
