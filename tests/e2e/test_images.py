"""Images through a real server by the official clients: the answers of transformers, however the image comes."""

from __future__ import annotations

import base64
import io
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import media_chat
import openai
import pytest
import torch
from pagoda.serving.frontend.media import MediaProcessor
from tiny_vision import add_processor, greedy, make_vision, picture
from toy_process import SERVE, ServerProcess

pytestmark = pytest.mark.heavy

COUNT = 8


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    picture(seed).save(stream, "png")
    return stream.getvalue()


def uri(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[int, str], Path]]:
    """Where it is, transformers' answers to one image and "t40", by the image's seed, and the folder of allowed files."""
    folder, files = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("files")
    model = make_vision(folder, "Llava")
    add_processor(folder)
    (files / "one.png").write_bytes(png(1))
    want = {}
    for seed in (1, 2):
        ids, items, _ = MediaProcessor(folder)("<image> t40 ", {"image": png(seed)}, add_special_tokens=False)
        pixels = torch.frombuffer(bytearray(items[0].tensors["pixel_values"].data), dtype=torch.float32).view(1, 3, 32, 32)
        want[seed] = " ".join(f"t{token}" for token in greedy(model, ids, {"pixel_values": pixels}, COUNT))
    flags = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32", "--max-model-len", "64"]
    flags += ["--kv-cache-memory-bytes", "8M", "--allowed-local-media-path", str(files), "--limit-mm-per-prompt", '{"image": 2}']
    with ServerProcess([*SERVE, str(folder), *flags], patience=180) as server:
        yield server.where, want, files


def chat(where: str, *addresses: str) -> str:
    return media_chat.chat(where, COUNT, *({"type": "image_url", "image_url": {"url": address, "detail": "low"}} for address in addresses))


def test_chat_sees_images_of_data_uris_and_of_files(served: tuple[str, dict[int, str], Path]) -> None:
    where, want, files = served
    assert want[1] != want[2]
    assert [chat(where, uri(1)), chat(where, uri(2)), chat(where, f"file://{files}/one.png")] == [want[1], want[2], want[1]]
    assert chat(where, uri(1), uri(2)) not in (want[1], want[2])


def test_what_is_not_allowed_is_refused_and_the_server_goes_on(served: tuple[str, dict[int, str], Path]) -> None:
    where, want, files = served
    for addresses, why in (
        ((f"{where}/health",), "no public host"),
        ((f"file://{files}/../x",), "allowed-local-media-path"),
        (("data:image/png;base64,AAAA",), "cannot be decoded"),
        ((uri(1),) * 3, "at most 2"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            chat(where, *addresses)
    assert chat(where, uri(1)) == want[1]
    with urllib.request.urlopen(f"{where}/health") as health:
        assert health.status == 200


def test_responses_and_messages_see_the_same(served: tuple[str, dict[int, str], Path]) -> None:
    where, want, files = served
    with openai.OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0, timeout=120) as client:
        model = client.models.list().data[0].id
        asked: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": uri(1)}, {"type": "input_text", "text": "t40"}]}]
        more = {"ignore_eos": True, "skip_special_tokens": False}
        told = client.responses.create(model=model, input=asked, temperature=0, max_output_tokens=16, extra_body=more)
    assert told.output_text.strip().startswith(want[1])
    within = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
    for source in (within, {"type": "url", "url": (files / "one.png").as_uri()}):
        assert want[1].startswith(message(where, model, [{"type": "image", "source": source}, {"type": "text", "text": "t40"}]))


def message(where: str, model: str, content: Any) -> str:
    """Anthropic's answer, its length checked."""
    with anthropic.Anthropic(base_url=where, api_key="none", max_retries=0, timeout=120) as other:
        said = other.messages.create(
            model=model, max_tokens=COUNT, messages=[{"role": "user", "content": content}], extra_body={"temperature": 0}
        )
        assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == 17
    return said.content[0].text.strip()
