"""Sounds through a real server by the official client: the answers of transformers, however the sound comes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from media_chat import chat
from tiny_hearing import greedy, make_hearing, wav
from toy_process import SERVE, ServerProcess

pytestmark = pytest.mark.heavy

COUNT = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[int, str], Path]]:
    """Where it is, transformers' answers to one sound and "t40", by the sound's seed, and the folder of allowed files."""
    folder, files = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("files")
    model = make_hearing(folder)
    (files / "one.wav").write_bytes(wav(1))
    want = {seed: " ".join(f"t{token}" for token in greedy(model, folder, "<sound> t40", seed, COUNT)) for seed in (1, 2)}
    flags = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32", "--max-model-len", "64"]
    flags += ["--kv-cache-memory-bytes", "8M", "--allowed-local-media-path", str(files), "--limit-mm-per-prompt", '{"audio": 1}']
    with ServerProcess([*SERVE, str(folder), *flags], patience=180) as server:
        yield server.where, want, files


def heard(seed: int) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(seed)).decode(), "format": "wav"}}


def address(url: str, kind: str = "audio_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": url}}


def test_sounds_come_in_the_body_and_by_their_address(served: tuple[str, dict[int, str], Path]) -> None:
    where, want, files = served
    assert want[1] != want[2]
    uri = "data:audio/wav;base64," + base64.b64encode(wav(2)).decode()
    assert [chat(where, COUNT, heard(1)), chat(where, COUNT, address(uri)), chat(where, COUNT, address(f"file://{files}/one.wav"))] == [
        want[1],
        want[2],
        want[1],
    ]


def test_what_is_not_taken_is_refused_and_the_server_goes_on(served: tuple[str, dict[int, str], Path]) -> None:
    where, want, files = served
    for parts, why in (
        ([address(f"{where}/health")], "no public host"),
        ([address(f"file://{files}/../x")], "allowed-local-media-path"),
        ([address("data:audio/wav;base64,AAAA")], "cannot be decoded"),
        ([heard(1), heard(2)], "at most 1"),
        ([address("data:image/png;base64,AAAA", "image_url")], "takes text and sounds"),
        ([address("data:video/jpeg;base64,AAAA", "video_url")], "leave out the videos"),
        ([{"type": "input_audio", "input_audio": {"format": "wav"}}], "must be like"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            chat(where, COUNT, *parts)
    assert chat(where, COUNT, heard(2)) == want[2]
