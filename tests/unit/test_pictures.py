"""Pictures of bytes: what is decoded, and what is refused before its pixels exist."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest
from pagoda.hal.errors import RequestError
from pagoda.serving.frontend import pictures
from pagoda.serving.frontend.pictures import decoded
from PIL import Image


def encoded(kind: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (4, 2), **options: object) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, None).save(stream, kind, **options)
    return stream.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A header that promises so many points and brings none."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


@pytest.mark.parametrize(
    ("kind", "mode"), [("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16"), ("JPEG", "L"), ("WEBP", "RGB"), ("GIF", "P"), ("BMP", "1")]
)
def test_pictures_come_in_colours(kind: str, mode: str) -> None:
    picture = decoded(encoded(kind, mode))
    assert (picture.mode, picture.size) == ("RGB", (4, 2))
    assert decoded("data:image/png;base64," + base64.b64encode(encoded(kind, mode)).decode()).size == (4, 2)


def test_a_turned_photograph_is_set_upright() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    assert decoded(encoded("JPEG", exif=turned)).size == (2, 4)


@pytest.mark.parametrize(
    "data", [png_of(60_000, 60_000), png_of(9000, 9000), png_of(4, 4), encoded()[:40], b"", b"GIF89a", b"<svg/>", encoded("TIFF")]
)
def test_what_is_none_or_too_large_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"cannot be decoded|at most"):
        decoded(data)


def test_a_data_uri_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 20)
    with pytest.raises(RequestError, match="at most 20"):
        decoded("data:image/png;base64," + base64.b64encode(encoded()).decode())
