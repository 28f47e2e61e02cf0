"""Pictures, videos and sounds of bytes: what is decoded, and what is refused before its pixels exist."""

from __future__ import annotations

import base64
import io
import struct
import sys
import zlib

import av
import pytest
from pagoda.hal.errors import RequestError
from pagoda.serving.frontend import media_files
from pagoda.serving.frontend.media_files import data_of, picture_of, sound_of, video_of
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
    picture = picture_of(encoded(kind, mode))
    assert (picture.mode, picture.size) == ("RGB", (4, 2))
    assert picture_of("data:image/png;base64," + base64.b64encode(encoded(kind, mode)).decode()).size == (4, 2)


def test_a_turned_photograph_is_set_upright() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    assert picture_of(encoded("JPEG", exif=turned)).size == (2, 4)


@pytest.mark.parametrize(
    "data", [png_of(60_000, 60_000), png_of(9000, 9000), png_of(4, 4), encoded()[:40], b"", b"GIF89a", b"<svg/>", encoded("TIFF")]
)
def test_what_is_none_or_too_large_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"cannot be decoded|at most"):
        picture_of(data)


def test_a_data_uri_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "MAX_BYTES", 20)
    with pytest.raises(RequestError, match="at most 20"):
        picture_of("data:image/png;base64," + base64.b64encode(encoded()).decode())


def moving(kind: str = "GIF", count: int = 3) -> bytes:
    stream = io.BytesIO()
    first, *others = [Image.new("RGB", (4, 2), (80 * i, 0, 0)) for i in range(count)]
    first.save(stream, kind, save_all=True, append_images=others, lossless=True)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_a_moving_picture_is_a_video(kind: str) -> None:
    frames = video_of(moving(kind))
    assert [frame.size for frame in frames] == [(4, 2)] * 3
    assert [round(frame.getpixel((0, 0))[0], -1) for frame in frames] == [0, 80, 160]


def test_frames_are_a_video() -> None:
    pictures = [encoded(), encoded("JPEG")]
    uri = "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in pictures)
    assert data_of(uri) == pictures
    assert [frame.size for frame in video_of(uri)] == [frame.size for frame in video_of(pictures)] == [(4, 2)] * 2


def film(kind: str, frames: int = 50) -> bytes:
    """Grey pictures, the later the brighter, ten a second."""
    stream = io.BytesIO()
    with av.open(stream, "w", format=kind) as container:
        track = container.add_stream("mpeg4" if kind != "webm" else "libvpx", rate=10)
        track.width, track.height, track.pix_fmt = 32, 16, "yuv420p"
        for i in range(frames):
            container.mux(track.encode(av.VideoFrame.from_image(Image.new("RGB", (32, 16), (5 * i, 5 * i, 5 * i)))))
        container.mux(track.encode())
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "webm", "avi"])
def test_a_film_is_pictures_evenly_over_its_length(kind: str) -> None:
    found = video_of(film(kind))
    indices = found.metadata["frames_indices"]
    assert len(found.frames) == len(indices) == 32 and (indices[0], indices[-1]) == (0, 49)
    assert abs(found.metadata["fps"] - 10) < 0.01 and found.metadata["total_num_frames"] == 50
    assert all(abs(picture.getpixel((9, 9))[0] - 5 * index) < 12 for index, picture in zip(indices, found.frames, strict=True))
    assert len(video_of(film(kind, 3)).frames) == 3


def test_films_have_bounds_and_what_looks_like_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = film("mp4")
    monkeypatch.setattr(media_files, "MAX_PIXELS", 32 * 16 * 7)
    assert len(video_of(made).frames) == 7
    monkeypatch.setattr(media_files, "MAX_PIXELS", 32 * 16 - 1)
    for bad, why in ((made, "32 by 16 points"), (made[:200], "cannot be decoded"), (b"#EXTM3U\nhttp://127.0.0.1/", "must be one of")):
        with pytest.raises(RequestError, match=why):
            video_of(bad)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match="needs the package av"):
        video_of(made)


def test_videos_and_sounds_that_are_none_or_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "MAX_FRAMES", 2)
    for bad in (moving(), [encoded()] * 3, [], b"\x00\x00\x00\x18ftypmp42", [b"x"]):
        with pytest.raises(RequestError, match=r"at most|from 1 to 2|cannot be decoded"):
            video_of(bad)
    for bad in (b"", b"RIFF", "data:audio/wav;base64,AAAA", "data:audio/wav,x", "data:text/plain;base64,AAAA"):
        with pytest.raises(RequestError, match=r"empty|cannot be decoded|base64|data URI"):
            sound_of(bad)
    monkeypatch.setattr(media_files, "MAX_SECONDS", 0)
    with pytest.raises(RequestError, match="at most 0"):
        sound_of([0.0] * 8)
