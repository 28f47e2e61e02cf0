"""`/v1/messages` through the official client, over an engine that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagoda.serving.api.anthropic.protocol import CountRequest, ToolChoice, Turn
from pagoda.serving.api.anthropic.translate import chat_request
from pagoda.serving.api.errors import DrainingError
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.frontend.text import TextFrontend
from patience import eventually
from scripted import Scripted, text_side
from toy_engine import ToyEngine
from toy_server import Toy, toy_server

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
USER = [{"role": "user", "content": "Rome?"}]
THOUGHT = "<think>\nWhere? 日本\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


@asynccontextmanager
async def client(engine: ToyEngine, text: TextFrontend | None = None, **flags: Any) -> AsyncIterator[tuple[Any, Toy]]:
    async with toy_server(engine, text=text or text_side(), **flags) as toy:
        base = str(toy.http.base_url).rstrip("/")
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(base_url=base, api_key="key", max_retries=0, http_client=http) as made:
            yield made.messages, toy


def prompt_of(toy: Toy, index: int = 0) -> str:
    return bytes(toy.engine.requests[index].prompt).decode()


async def ask(endpoint: Any, **fields: Any) -> Message:
    return await endpoint.create(**{"model": "toy", "max_tokens": 500, "messages": USER, **fields})


async def test_a_whole_message() -> None:
    async with client(Scripted(f"{THOUGHT}I look.\n{CALLS}")) as (messages, toy):
        reply = await ask(messages, tools=[WEATHER], system="Be brief.")
        prompt = prompt_of(toy)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, text, first, second = reply.content
    assert (thought.thinking, text.text) == ("Where? 日本", "I look.")
    assert thought.signature
    assert [(call.name, call.input) for call in (first, second)] == [("weather", {"city": "Rome é"}), ("weather", {"city": "Oslo"})]
    assert first.id != second.id
    assert reply.id == f"msg_{reply._request_id}"
    assert (reply.stop_reason, reply.role, reply.type, reply.model) == ("tool_use", "assistant", "message", "toy")
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == len(prompt.encode())
    assert 0 < reply.usage.output_tokens_details.thinking_tokens < reply.usage.output_tokens
    assert "Be brief." in prompt and '"description": "Weather of a city"' in prompt


async def test_the_events_of_a_stream() -> None:
    async with client(Scripted(f"{THOUGHT}Hm\n{CALLS}", 4)) as (_, toy):
        body = {"model": "toy", "max_tokens": 500, "messages": USER, "tools": [WEATHER], "stream": True}
        response = await toy.http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\ndata: ") for event in response.text.split("\n\n") if event]
    records = [json.loads(data) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [record["type"] for record in records]
    shape = [record["type"] for record in records if record["type"] != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 4
    assert shape == ["message_start", "ping", *blocks, "message_delta", "message_stop"]
    kinds = dict.fromkeys((record["index"], record["delta"]["type"]) for record in records if record["type"] == "content_block_delta")
    assert list(kinds) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
        (3, "input_json_delta"),
    ]
    assert records[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


PIECES = st.lists(st.sampled_from(["Hi ", "é日", "\n", "{", "<tool_call>", "</tool_call>", CALLS[:70], CALLS, '"x"']), max_size=6)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(thought=st.sampled_from(["", THOUGHT, "<think>cut"]), pieces=PIECES, burst=st.integers(1, 9), seed=st.integers(0, 9))
async def test_a_stream_says_what_the_whole_message_says(thought: str, pieces: list[str], burst: int, seed: int) -> None:
    async with client(Scripted(thought + "".join(pieces), burst)) as (messages, _):
        fields = {"model": "toy", "max_tokens": 500, "messages": USER, "tools": [WEATHER], "extra_body": {"seed": seed}}
        whole = await messages.create(**fields)
        async with messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
    assert told(streamed) == told(whole)


def told(message: Message) -> dict[str, Any]:
    record = message.model_dump(exclude={"id", "parsed_output"})
    return record | {"content": [{k: v for k, v in block.items() if k not in ("id", "parsed_output")} for block in record["content"]]}


async def test_a_conversation_reaches_the_template() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Röme"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "21 degrees"}]},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "broken", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    async with client(Scripted("x")) as (messages, toy):
        await ask(messages, messages=turns, system=system, tools=[WEATHER], metadata={"user_id": "u"})
        prompt = prompt_of(toy)
    parts = ("Be brief.", "One", "two", "Rome?", "Wait.", '"city": "Röme"', "21 degrees", "Error: broken", "So?")
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places)


async def test_the_answer_goes_on_from_the_assistants_words() -> None:
    async with client(Scripted("in")) as (messages, toy):
        await ask(messages, messages=[*USER, {"role": "assistant", "content": "It is s"}])
        assert prompt_of(toy).endswith("It is s")


async def test_reasons_to_stop() -> None:
    async with client(Scripted("one two")) as (messages, _):
        assert (await ask(messages)).stop_reason == "end_turn"
        stopped = await ask(messages, stop_sequences=["wo", "tw"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "tw", "one ")
    async with client(Scripted("one", reason=FinishReason.LENGTH)) as (messages, toy):
        assert (await ask(messages, max_tokens=3)).stop_reason == "max_tokens"
        assert (await ask(messages, max_tokens=8000)).stop_reason == "model_context_window_exceeded"
        first, second = toy.engine.requests
    assert (first.params.max_tokens, second.params.max_tokens) == (3, 4096 - len(second.prompt))


async def test_settings_reach_the_engine() -> None:
    async with client(Scripted("x")) as (messages, toy):
        extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}
        await ask(messages, max_tokens=9, stop_sequences=["q"], extra_body=extra)
        params = toy.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.stop, params.seed) == (0.5, 0.9, 7, 9, ("q",), 3)


async def test_thinking_is_switched_in_the_template() -> None:
    shows = "{{ enable_thinking is defined and enable_thinking }}{{ messages[0].content }}<think></think>"
    async with client(Scripted(f"{THOUGHT}Yes"), text_side(shows)) as (messages, toy):
        on = await ask(messages, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
        off = await ask(messages, thinking={"type": "disabled"})
        free = await ask(messages, thinking={"type": "adaptive"})
        hidden = await ask(messages, thinking={"type": "adaptive", "display": "omitted"})
        async with messages.stream(
            model="toy", max_tokens=500, messages=USER, thinking={"type": "adaptive", "display": "omitted"}
        ) as stream:
            streamed = await stream.get_final_message()
        assert [prompt_of(toy, i)[:5] for i in range(2)] == ["True" + "R", "False"]
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens=100"):
            await ask(messages, thinking={"type": "enabled", "budget_tokens": 100})
    assert [[block.type for block in reply.content] for reply in (on, off, free)] == [["thinking", "text"], ["text"], ["thinking", "text"]]
    assert hidden.content[0].thinking == "" and hidden.content[0].signature
    assert told(streamed) == told(hidden)


@pytest.mark.parametrize(
    ("reasoning", "bound"), [("qwen3", True), ("openai_gptoss", True), ("minimax_m2_append_think", False), ("none", False)]
)
async def test_a_budget_of_thoughts_reaches_the_engine(reasoning: str, bound: bool) -> None:
    """It is no error where there is nothing to bound: clients send one to any model."""
    async with client(Scripted("Yes"), text_side(reasoning=reasoning)) as (messages, toy):
        await ask(messages, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1100})
        await ask(messages, max_tokens=2000, thinking={"type": "disabled"})
        await ask(messages, max_tokens=2000, thinking={"type": "adaptive"})
        await ask(messages, max_tokens=2000)
        given, *others = [request.params.structured_outputs for request in toy.engine.requests]
    assert others == [None] * 3
    assert (given is not None) == bound
    if given is not None:
        assert given.free and given.thinking is not None and given.thinking.budget == 1100 and given.grace == 1100


async def test_a_budget_beside_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    thinking = {"type": "enabled", "budget_tokens": 1100}
    async with client(Scripted("{}"), text_side(reasoning="qwen3")) as (messages, toy):
        await ask(messages, max_tokens=2000, thinking=thinking, extra_body={"output_config": form})
        given = toy.engine.requests[0].params.structured_outputs
    assert given is not None and given.thinking is not None and (given.kind, given.thinking.budget, given.grace) == ("json", 1100, 0)


async def test_tool_choices() -> None:
    async with client(Scripted(CALLS)) as (messages, toy):
        await ask(messages, tools=[WEATHER], tool_choice={"type": "none"})
        assert "weather" not in prompt_of(toy)
        one = await ask(messages, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert len(one.content) == 1


def test_choices_go_on_to_chat() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, wanted in (("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", named)):
        given = ToolChoice(type=choice, name="weather" if choice == "tool" else None, disable_parallel_tool_use=True)
        chat = chat_request(CountRequest(model="toy", messages=[Turn(role="user", content="x")], tool_choice=given))
        assert (chat.tool_choice, chat.parallel_tool_calls) == (wanted, False)


async def test_a_schema_reaches_the_engine(require: Any) -> None:
    require("xgrammar", find_spec("xgrammar") is not None)
    schema = {"type": "object", "properties": {"city": {"type": "string", "title": "a city"}}}
    async with client(Scripted('{"city": "Rome"}')) as (messages, toy):
        reply = await ask(messages, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
        assert '"a city"' in str(toy.engine.requests[0].params) or "'a city'" in str(toy.engine.requests[0].params)
    assert reply.content[0].text == '{"city": "Rome"}'


async def test_tokens_are_counted() -> None:
    async with client(Scripted("x")) as (messages, toy):
        fields = {"messages": USER, "system": "Be brief.", "tools": [WEATHER]}
        count = await messages.count_tokens(model="toy", **fields)
        await ask(messages, **fields)
        assert count.input_tokens == len(toy.engine.requests[0].prompt)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
WRONG: dict[str, dict[str, Any]] = {
    "takes text only": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
    r"messages\[0\].content\[0\].content\[0\] has type 'image'": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}]
    },
    "runs no tools of its own": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "temperature=99999": {"extra_body": {"temperature": 99999}},
    "max_tokens=0": {"max_tokens": 0},
    "messages is empty": {"messages": []},
    "mcp_servers is not supported": {"extra_body": {"mcp_servers": [{"url": "x"}]}},
    "header anthropic-version": {"extra_headers": {"anthropic-version": "2023-01-01"}},
}


@pytest.mark.parametrize("message", WRONG)
async def test_what_is_wrong_is_named(message: str) -> None:
    async with client(Scripted("x")) as (messages, _):
        with pytest.raises(anthropic.BadRequestError, match=message) as raised:
            await ask(messages, **WRONG[message])
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "invalid_request_error"


async def test_errors_have_the_protocols_shape() -> None:
    async with client(Scripted("x"), api_key=("key",)) as (messages, toy):
        with pytest.raises(anthropic.NotFoundError) as missing:
            await ask(messages, model="nobody")
        answers = {
            "key": await toy.http.post("/v1/messages", json={}),
            "path": await toy.http.get("/v1/messages/nothing", headers={"x-api-key": "key"}),
            "field": await toy.http.post("/v1/messages", json={"model": "toy", "messages": []}, headers={"x-api-key": "key"}),
            "other": await toy.http.post("/v1/chat/completions", json={}),
        }
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert "x-api-key" in error_of(answers["key"], 401, "authentication_error")
    assert "nothing at GET" in error_of(answers["path"], 404, "not_found_error")
    assert "max_tokens is missing" in error_of(answers["field"], 400, "invalid_request_error")
    assert answers["other"].json()["error"]["code"] == "invalid_api_key"


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    record = response.json()
    assert (response.status_code, record["type"], record["error"]["type"]) == (status, "error", kind)
    assert record["request_id"] == response.headers["x-request-id"]
    return record["error"]["message"]


async def test_a_server_that_ends_is_overloaded_and_an_abort_is_told() -> None:
    async with client(Scripted("x" * 50, reason=FinishReason.ABORT)) as (messages, toy):
        with pytest.raises(anthropic.APIStatusError) as cut:
            async with messages.stream(model="toy", max_tokens=9, messages=USER) as stream:
                await stream.get_final_message()
        toy.service.draining = True
        assert isinstance(toy.service.ended_early(), DrainingError)
        with pytest.raises(anthropic.APIStatusError) as closed:
            await ask(messages)
        toy.service.draining = False
        toy.engine.dead = "gone"
        with pytest.raises(anthropic.InternalServerError) as dead:
            await ask(messages)
    assert cut.value.body["error"] == {"type": "api_error", "message": "the request was ended by its id"}
    assert (closed.value.status_code, closed.value.body["error"]["type"]) == (529, "overloaded_error")
    assert dead.value.body["error"]["type"] == "api_error"


async def test_leaving_a_stream_ends_the_request() -> None:
    async with client(Scripted("x" * 200, held=9)) as (messages, toy):
        stream = await messages.create(model="toy", max_tokens=300, messages=USER, stream=True)
        async for event in stream:
            if event.type == "content_block_delta":
                break
        await stream.close()
        await eventually(lambda: toy.engine.aborted)
    assert len(toy.engine.aborted) == 1


async def test_the_models_are_listed_in_the_protocols_words() -> None:
    async with client(Scripted("x")) as (messages, toy):
        models = messages._client.models
        page = await models.list()
        one = await models.retrieve("toy-alias")
        plain = (await toy.http.get("/v1/models")).json()
    names = ["toy", "toy-alias"]
    assert [(model.id, model.type, model.display_name) for model in page.data] == [(name, "model", name) for name in names]
    assert (page.first_id, page.last_id, page.has_more) == ("toy", "toy-alias", False)
    assert one.created_at.timestamp() == plain["data"][1]["created"] and one.max_tokens == plain["data"][1]["max_model_len"]
    assert plain["object"] == "list"


async def test_documents_of_text_are_read() -> None:
    parts = [{"type": "text", "text": "Part one."}, {"type": "text", "text": "Part two."}]
    documents = [
        {
            "type": "document",
            "title": "Rome",
            "context": "a guide",
            "source": {"type": "text", "media_type": "text/plain", "data": "Seven hills."},
        },
        {"type": "document", "source": {"type": "content", "content": parts}},
        {"type": "document", "source": {"type": "content", "content": "As it is."}},
    ]
    async with client(Scripted("x"), text_side("{% for m in messages %}{{ m.content }}{% endfor %}")) as (messages, toy):
        await ask(messages, messages=[{"role": "user", "content": [*documents, {"type": "text", "text": "So?"}]}])
        assert prompt_of(toy) == "Rome\na guide\nSeven hills.\nPart one.\nPart two.\nAs it is.\nSo?"
        pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}}
        with pytest.raises(anthropic.BadRequestError, match="takes text, content"):
            await ask(messages, messages=[{"role": "user", "content": [pdf]}])
