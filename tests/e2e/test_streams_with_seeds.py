"""A real engine under a seed: sampled answers are the same whole and streamed, on every endpoint that streams."""

from __future__ import annotations

import httpx
import pytest
from assembled import both
from tiny_servers import tiny_server, tone

pytestmark = pytest.mark.heavy
USER = [{"role": "user", "content": "hello"}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"]}}
FORM = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer"}}, "required": ["a", "b"]}
CHAT = {"messages": USER, "max_tokens": 30, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_k": 50}
BODIES = [
    ("/v1/completions", {"prompt": ["hello", "the quick"], "max_tokens": 24, "n": 2, "logprobs": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 24, "echo": True, "stop": ["a", "e"], "frequency_penalty": 0.5}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 40, "structured_outputs": {"regex": "[a-z]{3,9}[0-9]{2}"}}),
    ("/v1/chat/completions", {**CHAT, "n": 3, "logprobs": True, "top_logprobs": 3, "return_token_ids": True}),
    (
        "/v1/chat/completions",
        {"messages": USER, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 60},
    ),
    (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": FORM}}},
    ),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 30}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 60, "tools": [{"type": "function", **TOOL}], "tool_choice": "required"}),
    ("/v1/messages", {"model": "tiny", "messages": USER, "max_tokens": 30, "stop_sequences": ["zz"]}),
    (
        "/inference/v1/generate",
        {"token_ids": [30, 40, 50], "sampling_params": {"max_tokens": 24, "n": 2, "logprobs": 1, "ignore_eos": True}},
    ),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("tiny"), "generate", "--tool-call-parser", "hermes") as server:
        yield server


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_same_content(served, path, body):
    async with httpx.AsyncClient(base_url=served.where, timeout=60) as http:
        seen = set()
        for seed in range(4):
            fields = {**SAMPLED, "seed": seed}
            given = {**body, "sampling_params": body["sampling_params"] | fields} if "sampling_params" in body else body | fields
            whole, streamed = await both(http, path, given)
            assert whole == streamed
            assert not (isinstance(whole, tuple) and isinstance(whole[0], int)), whole  # it was answered
            seen.add(str(whole))
        assert len(seen) > 1  # the seed matters


def test_speech(tmp_path):
    with tiny_server(tmp_path / "ear", "hear") as server:
        sent = {"file": ("a.wav", tone(2.5)), "temperature": (None, "0.8"), "seed": (None, "5")}
        whole = httpx.post(f"{server.where}/v1/audio/transcriptions", files=sent, timeout=60).json()["text"]
        lines = httpx.post(f"{server.where}/v1/audio/transcriptions", files={**sent, "stream": (None, "true")}, timeout=60).text.split("\n")
        events = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
    assert whole
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")).strip() == whole
    assert events[-1]["text"] == whole
