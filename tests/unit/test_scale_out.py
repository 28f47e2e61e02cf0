"""Token ids in, token ids out, and the requests that are made of texts and conversations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toy_engine import BOS, EOS
from toy_server import toy_server

PATH = "/inference/v1/generate"


async def test_ids_in_ids_out() -> None:
    async with toy_server() as toy:
        params = {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1, "n": 2}
        body = {"token_ids": [97, 98, 99], "sampling_params": params, "request_id": "mine", "priority": -1, "cache_salt": "s"}
        reply = (await toy.http.post(PATH, json=body)).json()
        made = toy.engine.requests[-1]
        assert (made.prompt, made.priority, made.cache_salt, made.params.n) == ((97, 98, 99), -1, "s", 2)
        assert reply["request_id"] == "generate-mine"
        assert [one["token_ids"] for one in reply["choices"]] == [[97, 98, 99, EOS], [98, 99, 97, EOS]]
        assert [one["finish_reason"] for one in reply["choices"]] == ["stop", "stop"]
        assert [one["token"] for one in reply["choices"][0]["logprobs"]["content"]][:2] == ["token_id:97", "token_id:98"]
        assert reply["prompt_logprobs"][0] is None and "98" in reply["prompt_logprobs"][1]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 8)
        chunks = await toy.stream(PATH, **body)
        first = [token for chunk in chunks for one in chunk["choices"] if one["index"] == 0 for token in one["token_ids"]]
        assert first == [97, 98, 99, EOS] and chunks[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"token_ids": [9999]}, "prompt"),
        ({"token_ids": [1], "features": {"image": []}}, "features"),
        ({"token_ids": [1], "sampling_params": {"thinking_token_budget": -2}}, "thinking_token_budget"),
    ],
)
async def test_wrong_requests_name_the_field(body: dict, param: str) -> None:
    async with toy_server() as toy:
        reply = await toy.http.post(PATH, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


async def test_a_rendered_request_is_answered_as_its_origin() -> None:
    async with toy_server() as toy:
        fields = {"max_tokens": 5, "temperature": 0.5, "stop": ["z"], "seed": 7, "logit_bias": {"5": 1.0}, "priority": 3}
        chat = {"messages": [{"role": "user", "content": "hi"}], "model": "toy", **fields}
        rendered = (await toy.http.post("/v1/chat/completions/render", json=chat)).json()
        await toy.http.post("/v1/chat/completions", json=chat)
        reply = await toy.http.post(PATH, json=rendered)
        assert reply.status_code == 200, reply.text
        origin, again = toy.engine.requests[-2:]
        assert (again.prompt, again.params, again.priority) == (origin.prompt, origin.params, 3)
        texts = {"prompt": ["ab", "c"], "structured_outputs": {"choice": ["x", "y"]}, **fields}
        one, two = (await toy.http.post("/v1/completions/render", json=texts)).json()
        assert one["token_ids"] == [BOS, *b"ab"] and two["token_ids"] == [BOS, *b"c"]
        await toy.http.post("/v1/completions", json=texts | {"prompt": "ab"})
        assert (await toy.http.post(PATH, json=one)).status_code == 200
        origin, again = toy.engine.requests[-2:]
        assert again.params == origin.params and again.params.structured_outputs is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5, "stop_sequences": ["z"]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1 << 20, "system": "Be kind."}),
        ("/v1/responses", {"input": "hi", "instructions": "Be kind.", "max_output_tokens": 7, "top_p": 0.5}),
    ],
)
async def test_other_protocols_are_rendered_too(path: str, body: dict) -> None:
    async with toy_server() as toy:
        rendered = (await toy.http.post(f"{path}/render", json={"model": "toy", **body})).json()
        assert (await toy.http.post(path, json={"model": "toy", **body})).status_code == 200
        reply = await toy.http.post(PATH, json=rendered)
        assert reply.status_code == 200, reply.text
        origin, again = toy.engine.requests[-2:]
        assert (again.prompt, replace(again.params, seed=None)) == (origin.prompt, replace(origin.params, seed=None))
        wrong = await toy.http.post(f"{path}/render", json={**body, "model": "another"})
        assert wrong.status_code == 404


async def test_a_rendered_turn_knows_the_turns_before() -> None:
    async with toy_server() as toy:
        first = (await toy.http.post("/v1/responses", json={"model": "toy", "input": "one"})).json()
        body = {"model": "toy", "input": "two", "previous_response_id": first["id"]}
        rendered = (await toy.http.post("/v1/responses/render", json=body)).json()
        assert bytes(token for token in rendered["token_ids"] if token < 256).startswith(b"user:one")
