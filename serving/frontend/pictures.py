"""Pictures from what stands for them: encoded bytes, data URIs, or objects of this process; within bounds that no file can talk away."""

from __future__ import annotations

import base64
import binascii
import io
from importlib import import_module
from typing import Any

from pagoda.hal.errors import RequestError

MAX_PIXELS = 64 << 20
"""Larger pictures are refused before their pixels are decoded."""
MAX_BYTES = 32 << 20
"""Of one encoded picture."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decoded(given: Any) -> Any:
    """A picture for a processor: of bytes or a data URI, in colours and upright; other objects are given back as they are.

    Raises `RequestError` for what is no picture, or too large a one.
    """
    if isinstance(given, str):
        given = data_of(given)
    return _opened(given) if isinstance(given, bytes | bytearray) else given


def data_of(uri: str) -> bytes:
    """The bytes of a base64 data URI."""
    head, comma, body = uri.partition(",")
    if not head.startswith("data:image/") or not comma:
        raise RequestError("an image must come as a data URI here: data:image/png;base64,…", param="messages")
    if not head.endswith(";base64"):
        raise RequestError("the data URI of an image must be base64: data:image/png;base64,…", param="messages")
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise too_large(len(body) * 3 // 4)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the image is not valid base64: {error}", param="messages") from error


def too_large(size: int) -> RequestError:
    return RequestError(f"an image of {size} bytes or more; at most {MAX_BYTES} are taken; send a smaller one", param="messages")


def _opened(data: bytes | bytearray) -> Any:
    image, upright = import_module("PIL.Image"), import_module("PIL.ImageOps").exif_transpose
    try:
        with image.open(io.BytesIO(data), formats=FORMATS) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise RequestError(
                    f"an image of {picture.width} by {picture.height} points; at most {MAX_PIXELS} are taken; send a smaller one",
                    param="messages",
                )
            return upright(picture).convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # whatever a decoder raises, Pillow's own bound on pixels among it
        raise RequestError(f"the image cannot be decoded: {error}; it must be one of {', '.join(FORMATS)}", param="messages") from error
