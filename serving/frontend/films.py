"""Films (mp4, mov, webm, mkv, avi) to pictures evenly over their length, by PyAV, an optional package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from typing import Any, NamedTuple

from pagoda.hal.errors import RequestError

FRAMES = 32
"""Taken of a film, where it has so many; fewer where they would be more than `MAX_PIXELS` together."""
LONGEST = 1 << 17
"""Frames of a film, most of which are decoded and not taken."""


CONTAINERS = ((4, b"ftyp", "mp4"), (0, b"\x1aE\xdf\xa3", "matroska"), (8, b"AVI ", "avi"))
"""Where what stands in a film's bytes, and the one reader that it is given to: others open addresses that they find in a file."""


class Film(NamedTuple):
    """Pictures, and what a processor may want to know of them: when each was shown, and of how many."""

    frames: list[Any]
    metadata: dict[str, Any]


def container_of(data: bytes | bytearray) -> str | None:
    """Of a film; None of what is none."""
    return next((name for place, mark, name in CONTAINERS if data[place : place + len(mark)] == mark), None)


def film_of(data: bytes | bytearray, container: str, most_pixels: int) -> Film:
    """Raises `RequestError` for what is no film, or where PyAV is not installed."""
    try:
        av = import_module("av")
    except ImportError:
        others = "send a moving GIF, WebP or PNG, frames as a list, or as data:video/jpeg;base64,… with commas between"
        raise RequestError(f"the video is a film ({container}), which needs the package av: pip install av; or {others}") from None
    try:
        with av.open(BytesIO(data), format=container) as opened:
            return _film(opened, opened.streams.video[0], most_pixels)
    except RequestError:
        raise
    except Exception as error:  # whatever a decoder raises
        raise RequestError(f"the video cannot be decoded: {type(error).__name__}: {error}; send another file", param="messages") from error


def _film(container: Any, stream: Any, most_pixels: int) -> Film:
    rate = float(stream.average_rate or stream.guessed_rate or 24)
    count = stream.frames or int(float(container.duration or 0) / 1e6 * rate)
    if not 0 < count <= LONGEST:
        raise RequestError(f"the video says that it has {count} frames; from 1 to {LONGEST} are taken", param="messages")
    room = most_pixels // max(stream.width * stream.height, 1)
    if not room:
        raise RequestError(f"the video's frames have {stream.width} by {stream.height} points; send a smaller one", param="messages")
    wanted = _evenly(count, min(FRAMES, room))
    shown = list(_pictures(container.decode(stream), wanted))
    if not shown:
        raise RequestError("the video holds no frame that can be decoded; send another file", param="messages")
    metadata = {
        "total_num_frames": count, "fps": rate, "width": stream.width, "height": stream.height, "duration": count / rate,
        "video_backend": "pyav", "frames_indices": [index for index, _ in shown],
    }  # fmt: skip
    return Film([picture for _, picture in shown], metadata)


def _evenly(count: int, most: int) -> set[int]:
    taken = min(count, most)
    return {i * (count - 1) // max(taken - 1, 1) for i in range(taken)}


def _pictures(frames: Iterator[Any], wanted: set[int]) -> Iterator[tuple[int, Any]]:
    last = max(wanted)
    for index, frame in enumerate(frames):
        if index in wanted:
            yield index, frame.to_image()
        if index == last:
            return
