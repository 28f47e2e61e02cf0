"""Replies of audio requests, and the same as subtitles."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec


class DurationUsage(msgspec.Struct, kw_only=True):
    """What is counted is the sound's length."""

    type: str = "duration"
    seconds: int = 0


class Transcription(msgspec.Struct, kw_only=True):
    """The plain reply."""

    text: str
    usage: DurationUsage


class TranscriptionSegment(msgspec.Struct, kw_only=True):
    """What was said between two times, in seconds; `no_speech_prob` where the tokenizer has a token for silence."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | msgspec.UnsetType = msgspec.UNSET


class VerboseTranscription(msgspec.Struct, kw_only=True):
    """The reply with times."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment]
    usage: DurationUsage


class TextDeltaEvent(msgspec.Struct, kw_only=True):
    """Text that a stream adds."""

    type: str = "transcript.text.delta"
    delta: str = ""


class TextDoneEvent(msgspec.Struct, kw_only=True):
    """The end of a stream."""

    type: str = "transcript.text.done"
    text: str = ""


def compression_ratio(text: str) -> float:
    """How much shorter the text becomes: far above 2, it repeats itself."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 1.0


def as_srt(segments: Sequence[TranscriptionSegment]) -> str:
    lines = (f"{one.id + 1}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{one.text.strip()}\n" for one in segments)
    return "\n".join(lines)


def as_vtt(segments: Sequence[TranscriptionSegment]) -> str:
    lines = (f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{one.text.strip()}\n" for one in segments)
    return "\n".join(("WEBVTT\n", *lines))


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    return f"{milliseconds // 3600000:02d}:{milliseconds // 60000 % 60:02d}:{milliseconds // 1000 % 60:02d}{point}{milliseconds % 1000:03d}"
