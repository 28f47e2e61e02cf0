"""A real engine under a seed: sampled answers are the same whole and streamed, on every endpoint that streams."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest
from assembled import both
from pagoda.serving.api.grpc import pagoda_pb2 as pb
from pagoda.serving.api.grpc.pagoda_pb2_grpc import InferenceStub
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
    (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 30, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stop": ["a"]},
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 200, "n": 2, "repetition_detection": {"max_pattern_size": 2, "min_count": 2}, "top_k": 4, "logprobs": True},
    ),
    ("/v1/chat/completions", {**CHAT, "bad_words": ["a", "the"], "logit_bias": {"50": 2}, "min_tokens": 5, "presence_penalty": 1.0}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 60, "tools": [{"type": "function", **TOOL}], "tool_choice": "required"}),
    ("/v1/messages", {"model": "tiny", "messages": USER, "max_tokens": 30, "stop_sequences": ["zz"]}),
    (
        "/inference/v1/generate",
        {"token_ids": [30, 40, 50], "sampling_params": {"max_tokens": 24, "n": 2, "logprobs": 1, "ignore_eos": True}},
    ),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("tiny"), "generate", "--tool-call-parser", "hermes", "--grpc-port", "0") as server:
        yield server


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_same_content(served, path, body):
    async with httpx.AsyncClient(base_url=served.where, timeout=60) as http:
        seen = set()
        for seed in range(4):
            fields = {**SAMPLED, "seed": seed}
            given = {**body, "sampling_params": body["sampling_params"] | fields} if "sampling_params" in body else fields | body
            whole, streamed = await both(http, path, given)
            assert whole == streamed
            assert not (isinstance(whole, tuple) and isinstance(whole[0], int)), whole  # it was answered
            seen.add(str(whole))
        assert len(seen) > 1  # the seed matters


def test_in_the_background(served):
    with httpx.Client(base_url=served.where, timeout=60) as http:
        for seed in range(3):
            body = {"input": "hello", "max_output_tokens": 30, "seed": seed, **SAMPLED}
            whole = http.post("/v1/responses", json=body).json()
            streamed = http.post("/v1/responses", json={**body, "stream": True, "background": True}).text
            events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
            assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text_of(whole)
            assert text_of(events[-1]["response"]) == text_of(whole) != ""


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def test_over_grpc(served):
    with grpc.insecure_channel(served.grpc) as channel:
        stub, seen = InferenceStub(channel), set()
        for seed in range(4):
            sampling = pb.SamplingParams(max_tokens=24, n=2, temperature=1.0, top_k=50, seed=seed, logprobs=1, stop=["zz"])
            request = pb.GenerateRequest(text="hello", sampling=sampling)
            whole = stub.Generate(request, timeout=60)
            grown = {one.index: [[], "", []] for one in whole.sequences}
            for chunk in stub.GenerateStream(request, timeout=60):
                for one in chunk.sequences:
                    grown[one.index][0] += one.token_ids
                    grown[one.index][1] += one.text
                    grown[one.index][2] += [(entry.token_id, entry.logprob) for entry in one.logprobs]
            for one in whole.sequences:
                assert grown[one.index] == [[*one.token_ids], one.text, [(entry.token_id, entry.logprob) for entry in one.logprobs]]
            seen.add(str(grown))
        assert len(seen) == 4


def test_speech(tmp_path):
    with tiny_server(tmp_path / "ear", "hear") as server:
        sent = {"file": ("a.wav", tone(2.5)), "temperature": (None, "0.8"), "seed": (None, "5")}
        whole = httpx.post(f"{server.where}/v1/audio/transcriptions", files=sent, timeout=60).json()["text"]
        lines = httpx.post(f"{server.where}/v1/audio/transcriptions", files={**sent, "stream": (None, "true")}, timeout=60).text.split("\n")
        events = [httpx.Response(200, text=line[6:]).json() for line in lines if line.startswith("data: {")]
    assert whole
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")).strip() == whole
    assert events[-1]["text"] == whole
