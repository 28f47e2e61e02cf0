"""Bad requests: each is answered with the protocol's error object, and a stream that runs meanwhile never notices."""

import asyncio
import json

import pytest
from patience import eventually
from toy_engine import MAX_LEN, ToyEngine
from toy_server import events, toy_server

TOOL = {"type": "function", "function": {"name": "weather"}}
BAD_TOOL = {"type": "function", "function": {"name": "weather", "parameters": 3}}
NAMED = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"

CASES = {
    "invalid JSON": (COMPLETION, b'{"prompt": "x"', 400, None, "not JSON"),
    "invalid UTF-8": (COMPLETION, b'{"prompt": "\xff"}', 400, None, "not UTF-8"),
    "half a surrogate": (COMPLETION, b'{"prompt": "\\ud800 abcdefghijkl"}', 400, None, "not JSON"),
    "NaN": (COMPLETION, b'{"prompt": "x", "temperature": NaN}', 400, None, "not JSON"),
    "deep nesting": (COMPLETION, b"[" * 100_000, 400, None, "not JSON"),
    "no object": (COMPLETION, b"[1]", 400, None, "must be an object"),
    "empty body": (CHAT, b"", 400, None, "not JSON"),
    "no messages": (CHAT, {}, 400, "messages", "missing"),
    "empty messages": (CHAT, {"messages": []}, 400, "messages", "empty"),
    "messages of a wrong type": (CHAT, {"messages": "hi"}, 400, "messages", "expected `array`"),
    "no prompt": (COMPLETION, {}, 400, "prompt", "missing"),
    "empty prompt list": (COMPLETION, {"prompt": []}, 400, "prompt", "empty"),
    "prompt without tokens": (COMPLETION, {"prompt": "", "add_special_tokens": False}, 400, "prompt", "no tokens"),
    "mixed prompt": (COMPLETION, {"prompt": [1, "a"]}, 400, "prompt", "mixes"),
    "prompt of objects": (COMPLETION, {"prompt": [{"a": 1}]}, 400, "prompt[0]", "got `object`"),
    "too many prompts": (COMPLETION, {"prompt": ["a"] * 2000}, 400, "prompt", "2000 prompts"),
    "wrong type": (COMPLETION, {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens", "expected `int | null`, got `str`"),
    "wrong type in a list": (COMPLETION, {"prompt": "x", "stop": ["a", 3]}, 400, "stop[1]", "got `int`"),
    "wrong key": (COMPLETION, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "expected `int`"),
    "huge n": (COMPLETION, {"prompt": "x", "n": 10**9}, 400, "n", "out of range"),
    "n beyond 64 bits": (COMPLETION, {"prompt": "x", "n": 10**30}, 400, "n", "out of range"),
    "zero n": (CHAT, {"messages": MESSAGES, "n": 0}, 400, "n", "out of range"),
    "negative budget": (COMPLETION, {"prompt": "x", "max_tokens": -1}, 400, "max_tokens", "-1"),
    "negative chat budget": (
        CHAT,
        {"messages": MESSAGES, "max_completion_tokens": -5},
        400,
        "max_completion_tokens",
        "max_completion_tokens=-5",
    ),
    "temperature": (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "temperature", "out of range"),
    "top_p": (CHAT, {"messages": MESSAGES, "top_p": 0}, 400, "top_p", "out of range"),
    "too many logprobs": (COMPLETION, {"prompt": "x", "logprobs": 1000}, 400, "logprobs", "out of range"),
    "top_logprobs alone": (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs", "logprobs=true"),
    "unknown model": (CHAT, {"messages": MESSAGES, "model": "gpt-0"}, 404, "model", "'gpt-0' is not served"),
    "long prompt": (COMPLETION, {"prompt": "x" * 5000}, 400, "prompt", "5001 tokens, but prompt and answer together may have 4096"),
    "too much to say": (COMPLETION, {"prompt": "xy", "max_tokens": 4096}, 400, "max_tokens", "ask for at most 4093"),
    "token id": (COMPLETION, {"prompt": [1, 999]}, 400, "prompt", "999"),
    "negative token id": (COMPLETION, {"prompt": [1, -1]}, 400, "prompt", "-1"),
    "stop token id": (COMPLETION, {"prompt": "x", "stop_token_ids": [70000]}, 400, "stop_token_ids", "70000"),
    "bias of no token": (COMPLETION, {"prompt": "x", "logit_bias": {"258": 1}}, 400, "logit_bias", "258"),
    "empty stop": (COMPLETION, {"prompt": "x", "stop": ""}, 400, "stop", "empty"),
    "empty bad word": (COMPLETION, {"prompt": "x", "bad_words": [" "]}, 400, "bad_words", "empty"),
    "options without stream": (CHAT, {"messages": MESSAGES, "stream_options": {}}, 400, "stream_options", "stream=true"),
    "best_of below n": (COMPLETION, {"prompt": "x", "n": 3, "best_of": 2}, 400, "best_of", "at least"),
    "best_of streamed": (COMPLETION, {"prompt": "x", "best_of": 2, "stream": True}, 400, "best_of", "streamed"),
    "beams streamed": (COMPLETION, {"prompt": "x", "use_beam_search": True, "stream": True}, 400, "use_beam_search", "streamed"),
    "truncation": (COMPLETION, {"prompt": "x", "truncate_prompt_tokens": 9999}, 400, "truncate_prompt_tokens", "out of range"),
    "truncation side": (
        COMPLETION,
        {"prompt": "x", "truncate_prompt_tokens": 1, "truncation_side": "up"},
        400,
        "truncation_side",
        "left or right",
    ),
    "far too long": (COMPLETION, {"prompt": "x" * 3_000_000}, 400, "prompt", "3000000 characters"),
    "far too long a chat": (CHAT, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}, 400, "prompt", "3000000 characters"),
    "huge priority": (COMPLETION, {"prompt": "x", "priority": 10**30}, 400, "priority", "<= 2147483647"),
    "too many stops": (COMPLETION, {"prompt": "x", "stop": ["a"] * 65}, 400, "stop", "length <= 64"),
    "long stop": (COMPLETION, {"prompt": "x", "stop": "a" * 1025}, 400, "stop", "length <= 1024"),
    "best_of": (COMPLETION, {"prompt": "x", "best_of": 300}, 400, "best_of", "best_of=300 is out of range"),
    "top_logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 99}, 400, "top_logprobs", "top_logprobs=99 is out"),
    "side without truncation": (COMPLETION, {"prompt": "x", "truncation_side": "up"}, 400, "truncation_side", "left or right"),
    "nothing allowed": (COMPLETION, {"prompt": "x", "allowed_token_ids": []}, 400, "allowed_token_ids", "empty"),
    "tiny penalty": (COMPLETION, {"prompt": "x", "repetition_penalty": 1e-300}, 400, "repetition_penalty", "out of range"),
    "min above the model's length": (COMPLETION, {"prompt": "x", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens", "exceeds"),
    "suffix": (COMPLETION, {"prompt": "x", "suffix": "y"}, 400, "suffix", "not supported"),
    "tools": (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools[0]", "function.name is missing"),
    "tools of a model without": (CHAT, {"messages": MESSAGES, "tools": [TOOL]}, 400, "tools", "not supported"),
    "a tool without a schema": (CHAT, {"messages": MESSAGES, "tools": [BAD_TOOL]}, 400, "tools[0]", "must be a JSON schema"),
    "a tool of another type": (CHAT, {"messages": MESSAGES, "tools": [{"type": "web"}]}, 400, "tools[0]", "must be function"),
    "a forced tool": (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}, 400, "tools", "not supported"),
    "a named tool": (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": NAMED}, 400, "tools", "not supported"),
    "response_format": (CHAT, {"messages": MESSAGES, "response_format": {"type": "grammar"}}, 400, "response_format", "not supported"),
    "no schema": (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "response_format", "schema is missing"),
    "structured": (COMPLETION, {"prompt": "x", "structured_outputs": {"regexp": "a"}}, 400, "structured_outputs", "no key 'regexp'"),
    "tokenize nothing": ("/tokenize", {}, 400, "prompt", "either"),
    "detokenize": ("/detokenize", {"tokens": [9999]}, 400, "tokens", "9999"),
    "no such place": ("/v1/nothing", {}, 404, None, "nothing at POST /v1/nothing"),
}


@pytest.fixture
async def toy():
    async with toy_server(ToyEngine()) as server:
        yield server


async def test_each_bad_request_harms_nobody_else(toy):
    neighbour = asyncio.ensure_future(
        toy.http.post(COMPLETION, json={"prompt": "neighbour", "stream": True, "ignore_eos": True, "max_tokens": 300})
    )
    toy.engine.held = 9
    await eventually(lambda: toy.engine.generated)
    for name, (path, body, status, param, words) in CASES.items():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await toy.http.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == status, (name, response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, (name, error)
        assert words in error["message"], (name, error)
    toy.engine.held = None
    chunks = events((await neighbour).text)
    assert len("".join(chunk["choices"][0]["text"] for chunk in chunks)) == 300 - 300 // 10
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert toy.service.load == 0
    assert len(toy.engine.requests) == 1


async def test_harmless_forms_of_unsupported_fields_pass(toy):
    fields = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": True,
        "prediction": {"type": "content", "content": "x"},
        "top_logprobs": 0,
        "user": "u",
    }
    assert (await toy.chat(**fields)).status_code == 200


async def test_a_whole_number_may_be_written_as_a_float(toy):
    fields = {"max_tokens": 4.0, "seed": 3.0, "stop_token_ids": [1.0], "temperature": 1, "logit_bias": {"5": 2.0}, "n": 1.0}
    assert (await toy.chat(**fields)).status_code == 200
    params = toy.engine.requests[-1].params
    assert (params.max_tokens, params.seed, params.stop_token_ids, params.n) == (4, 3, (1,), 1)
    half = await toy.chat(max_tokens=4.5)
    assert (half.status_code, half.json()["error"]["param"]) == (400, "max_tokens")
    deep = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4.5, "vllm_xargs": ' + b'{"a":' * 900 + b"1.0" + b"}" * 901
    assert (await toy.http.post(CHAT, content=deep, headers={"content-type": "application/json"})).status_code == 400


async def test_an_unknown_field_is_ignored_and_logged_once(toy, caplog):
    for _ in range(3):
        assert (await toy.chat(no_such_field=1)).status_code == 200
    assert sum("no_such_field" in record.message for record in caplog.records) == 1


async def test_wrong_method_and_media_type(toy):
    wrong = await toy.http.get(CHAT)
    form = await toy.http.post(CHAT, data={"messages": "x"})
    undeclared = await toy.http.post(CHAT, content=b"{}")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    assert form.status_code == undeclared.status_code == 415
    assert wrong.headers["allow"] == "POST"
    both = await toy.http.put("/v1/responses/resp_1")
    assert (both.status_code, both.headers["allow"]) == (405, "DELETE, GET, HEAD")
    spelled = await toy.http.put("/v1/responses/render")
    assert (spelled.status_code, spelled.headers["allow"]) == (405, "POST")


async def test_large_bodies_are_refused():
    async with toy_server(max_request_bytes=1000) as toy:

        async def chunks():
            for _ in range(30):
                yield b"x" * 100

        declared = await toy.http.post(COMPLETION, content=b"x" * 1001, headers={"content-type": "application/json"})
        streamed = await toy.http.post(COMPLETION, content=chunks(), headers={"content-type": "application/json"})
    assert (declared.status_code, streamed.status_code) == (413, 413)


async def refused_first(toy, calls, refusals):
    """Replies to calls of which so many are answered while the engine holds the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await eventually(lambda: sum(task.done() for task in tasks) == refusals)
    toy.engine.held = None
    return await asyncio.gather(*tasks)


async def test_full_queue():
    async with toy_server(ToyEngine(held=0), max_num_queued_reqs=2) as toy:
        replies = await refused_first(toy, [toy.complete("ab", max_tokens=1) for _ in range(5)], 3)
        refused = [reply for reply in replies if reply.status_code == 429]
        assert len(refused) == 3
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert refused[0].headers["retry-after"] == "1"
        assert (await toy.complete("ab", max_tokens=1)).status_code == 200
        assert "vllm:admission_rejections_total{" in (await toy.http.get("/metrics")).text


async def test_full_queue_by_tokens():
    async with toy_server(ToyEngine(held=0), max_num_queued_tokens=30) as toy:
        replies = await refused_first(toy, [toy.complete("a" * 14, max_tokens=1) for _ in range(4)], 2)
        assert sorted(reply.status_code for reply in replies) == [200, 200, 429, 429]
        assert (await toy.complete("a" * 100, max_tokens=1)).status_code == 200


async def test_a_dead_engine_answers_everybody(toy):
    toy.engine.held, body = 3, {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True}
    running = [
        asyncio.ensure_future(toy.http.post(COMPLETION, json={**body, "stream": stream})) for stream in (True, False) for _ in range(3)
    ]
    await eventually(lambda: toy.engine.generated == 6 * toy.engine.held)
    toy.engine.dead = "the rank 0 was killed by signal 9"
    for reply in await asyncio.gather(*running):
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert events(reply.text)[-1]["error"]["code"] == "engine_dead"
        else:
            assert reply.status_code == 503
            assert "signal 9" in reply.json()["error"]["message"]
    assert (await toy.http.get("/health")).status_code == 503
    assert (await toy.chat()).status_code == 503
    assert (await toy.http.get("/metrics")).status_code == 200


async def test_draining_refuses_new_requests_only(toy):
    toy.engine.held = 9
    running = asyncio.ensure_future(toy.complete("abc", max_tokens=100, ignore_eos=True))
    await eventually(lambda: toy.engine.live)
    toy.service.draining = True
    refused = await toy.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert (await toy.http.get("/health")).status_code == 503
    toy.engine.held = None
    assert (await running).json()["usage"]["completion_tokens"] == 100


class BrokenEngine(ToyEngine):
    async def generate(self, request, patience=1, plain=None):
        if len(request.prompt) > 3:
            raise KeyError("a secret path")
        async for delta in super().generate(request):
            yield delta


async def test_our_own_bugs_are_500s_without_details(caplog):
    async with toy_server(BrokenEngine()) as toy:
        whole = await toy.complete("abcdef")
        streamed = await toy.complete("abcdef", stream=True)
        fine = await toy.complete("ab")
    assert (whole.status_code, streamed.status_code, fine.status_code) == (500, 500, 200)
    assert "secret" not in whole.text + streamed.text
    assert any("secret" in str(record.exc_info) for record in caplog.records)


def test_the_limit_of_the_toy_is_the_one_in_the_cases():
    assert MAX_LEN == 4096


async def test_ids_that_no_tokenizer_has_are_refused_before_they_are_read(toy):
    for token in (10**30, -1, 2**31):
        for fields in ({}, {"thinking_token_budget": 0}, {"return_prompt_text": True}, {"bad_words": ["x"]}, {"echo": True}):
            response = await toy.complete([token], **fields)
            assert response.status_code == 400, (fields, response.text)
            assert response.json()["error"]["param"] == "prompt"
