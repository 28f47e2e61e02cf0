"""Prompts of embeddings through a real server: the answers of their tokens, in streams and beside texts; a wrong one harms nobody."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from frontend_samples import byte_level
from safetensors.torch import save as safetensors
from tiny_checkpoints import make
from toy_process import SERVE, ServerProcess

pytestmark = pytest.mark.heavy

IDS = [(11 * k + 17) % 500 + 5 for k in range(40)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, torch.Tensor]]:
    """A client, and the embeddings of `IDS`."""
    folder, tokenizer = tmp_path_factory.mktemp("tiny"), byte_level()
    model = make(folder, "Llama", vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1, pad_token_id=2)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.tensor(IDS)).detach()
    server = ServerProcess([*SERVE, str(folder), *flags, "--enable-prompt-embeds"], patience=180)
    with server, httpx.Client(base_url=server.where, timeout=120) as client:
        yield client, rows


def text(rows: torch.Tensor, *, plain: bool = False) -> str:
    stream = io.BytesIO()
    torch.save(rows, stream)
    return base64.b64encode(safetensors({"rows": rows.contiguous()}) if plain else stream.getvalue()).decode()


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 2, **fields}
    return client.post("/v1/completions", json=given)


def test_the_answer_is_that_of_the_tokens(served: tuple[httpx.Client, torch.Tensor]) -> None:
    client, rows = served
    (want,) = ask(client, prompt=IDS).json()["choices"]
    assert want["prompt_token_ids"] == IDS
    for given in (text(rows), text(rows, plain=True)):
        reply = ask(client, prompt_embeds=given).json()
        (choice,) = reply["choices"]
        assert choice == {**want, "prompt_token_ids": [], "logprobs": choice["logprobs"]}
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(want["logprobs"]["token_logprobs"], abs=1e-4)
        assert reply["usage"]["prompt_tokens"] == len(IDS)
    assert ask(client, prompt_embeds=text(rows)).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_streams_lists_and_cut_ones(served: tuple[httpx.Client, torch.Tensor]) -> None:
    client, rows = served
    want = [ask(client, prompt=ids).json()["choices"][0]["token_ids"] for ids in (IDS, IDS[:9], IDS[-9:])]
    stream = ask(client, prompt_embeds=text(rows), stream=True, logprobs=None).text
    assert stream.rstrip().endswith("[DONE]") and "error" not in stream
    both = ask(client, prompt_embeds=[text(rows), text(rows[:9])], prompt=IDS[:9]).json()["choices"]
    assert [choice["token_ids"] for choice in both] == [want[0], want[1], want[1]]
    for side, tokens in (("right", want[1]), ("left", want[2])):
        cut = ask(client, prompt_embeds=text(rows), truncate_prompt_tokens=9, truncation_side=side).json()
        assert cut["choices"][0]["token_ids"] == tokens and cut["usage"]["prompt_tokens"] == 9


def test_wrong_ones_are_refused_by_name_and_others_are_answered(served: tuple[httpx.Client, torch.Tensor]) -> None:
    client, rows = served
    for fields, why, param in (
        ({"prompt_embeds": text(rows[:, 1:])}, "width of this model", "prompt_embeds"),
        ({"prompt_embeds": text(rows.long())}, "int64", "prompt_embeds"),
        ({"prompt_embeds": text(rows[:1].expand(100000, -1))}, "at most", "prompt_embeds"),
        ({"prompt_embeds": "a file?"}, "no base64", "prompt_embeds"),
        ({"prompt_embeds": base64.b64encode(b"PK\x03\x04" + bytes(999)).decode()}, "cannot be read", "prompt_embeds"),
        ({"prompt_embeds": [text(rows), "AAAA"]}, "neither", "prompt_embeds"),
        ({"prompt_embeds": text(rows), "echo": True}, "has none", "echo"),
        ({"prompt_embeds": text(rows), "prompt_logprobs": 1}, "has none", "prompt_logprobs"),
        ({"prompt_embeds": 5}, "prompt_embeds", "prompt_embeds"),
    ):
        reply = ask(client, **fields)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param) and why in error["message"], error
        assert ask(client, prompt_embeds=text(rows), max_tokens=1).status_code == 200
