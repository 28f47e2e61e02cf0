"""Pictures, videos and sounds from what stands for them: encoded bytes, data URIs, or objects; within bounds that no file can talk away."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.films import container_of, film_of
from pagoda.serving.frontend.sound import RATE, resampled
from pagoda.serving.frontend.sound import decoded as samples_of

MAX_PIXELS = 64 << 20
"""Larger pictures are refused before their pixels are decoded."""
MAX_BYTES = 32 << 20
"""Of one encoded picture, video or sound."""
MAX_FRAMES = 768
"""Of one video."""
MAX_SECONDS = 3600
"""Of one sound."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
KINDS = ("image", "video", "audio")
FRAMES = "data:video/jpeg;base64,"
"""A video whose frames are pictures, one after another with commas between."""


def picture_of(given: Any) -> Any:
    """A picture for a processor: of bytes or a data URI, in colours and upright; other objects are given back as they are.

    Raises `RequestError` for what is no picture, or too large a one.
    """
    if isinstance(given, str):
        given = data_of(given)
    return _frames(given, "image")[0] if isinstance(given, bytes | bytearray) else given


def video_of(given: Any) -> Any:
    """A video for a processor: a list of pictures, of a moving picture's bytes or data URI, or of such a list; a `Film` of a film's; other
    objects as they are."""
    if isinstance(given, str):
        given = data_of(given)
    if isinstance(given, bytes | bytearray):
        container = container_of(given)
        return _frames(given, "video") if container is None else film_of(given, container, MAX_PIXELS)
    if isinstance(given, list | tuple):
        if not 0 < len(given) <= MAX_FRAMES:
            raise RequestError(f"a video of {len(given)} frames; from 1 to {MAX_FRAMES} are taken", param="messages")
        return [picture_of(frame) for frame in given]
    return given


def sound_of(given: Any) -> Any:
    """Samples `[n]` at RATE: of a file's bytes or data URI, or of (samples, rate); arrays are given back as they are."""
    if isinstance(given, str):
        given = data_of(given)
    if isinstance(given, bytes | bytearray):
        given = samples_of(bytes(given))
    elif isinstance(given, tuple):
        given = resampled(given[0], int(given[1]))
    if len(given) > MAX_SECONDS * RATE:
        raise RequestError(f"a sound of {len(given) / RATE:.0f} s; at most {MAX_SECONDS} are taken", param="messages")
    return given


def data_of(uri: str) -> Any:
    """The bytes of a base64 data URI; those of each frame where it is a video of pictures."""
    head, comma, body = uri.partition(",")
    kind = head.removeprefix("data:").partition("/")[0]
    if not head.startswith("data:") or kind not in KINDS or not comma:
        raise RequestError("an image must come as a data URI here: data:image/png;base64,…", param="messages")
    if not head.endswith(";base64"):
        raise RequestError(f"the data URI of the {kind} must be base64: {head};base64,…", param="messages")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise too_large(len(body) * 3 // 4, kind)
    parts = body.split(",") if uri.startswith(FRAMES) else [body]
    try:
        pieces = [base64.b64decode(part, validate=True) for part in parts]
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the {kind} is not valid base64: {error}", param="messages") from error
    return pieces if uri.startswith(FRAMES) else pieces[0]


def too_large(size: int, kind: str = "image") -> RequestError:
    return RequestError(f"the {kind} has {size} bytes or more; at most {MAX_BYTES} are taken; send a smaller one", param="messages")


def _frames(data: bytes | bytearray, kind: str) -> Sequence[Any]:
    """All pictures of a moving one where it is a video, else the first."""
    image, sequence, upright = (import_module(f"PIL.{name}") for name in ("Image", "ImageSequence", "ImageOps"))
    try:
        with image.open(io.BytesIO(data), formats=FORMATS) as picture:
            count = getattr(picture, "n_frames", 1) if kind == "video" else 1
            if picture.width * picture.height * count > MAX_PIXELS or count > MAX_FRAMES:
                raise RequestError(
                    f"the {kind} has {picture.width} by {picture.height} points and {count} frames; at most {MAX_PIXELS} points and"
                    f" {MAX_FRAMES} frames are taken; send a smaller one",
                    param="messages",
                )
            pictures = islice(sequence.Iterator(picture), count)
            return [upright.exif_transpose(frame).convert("RGB") for frame in pictures]
    except RequestError:
        raise
    except Exception as error:  # whatever a decoder raises, Pillow's own bound on pixels among it
        also = "" if kind == "image" else "; or a film (mp4, mov, webm, mkv, avi); or frames as a list, or as data:video/jpeg;base64,…"
        raise RequestError(
            f"the {kind} cannot be decoded: {error}; it must be one of {', '.join(FORMATS)}{also}", param="messages"
        ) from error
