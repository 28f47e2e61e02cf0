"""Tools and reasoning in chat completions, through the official client, over an engine that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from pagoda.serving.cli.remote import Remote
from pagoda.serving.cli.talk import RemoteTalker
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.frontend.text import TextFrontend
from scripted import Scripted, text_side
from toy_engine import BOS, ToyEngine, ToyTokenizer
from toy_server import Toy, toy_server

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}, "strict": True},
}
USER = {"role": "user", "content": "Rome?"}
LOOSE = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nWhere? 日本\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
EXPECTED = [("weather", {"city": "Rome é"}), ("weather", {"city": "Oslo"})]


@asynccontextmanager
async def client(engine: ToyEngine, text: TextFrontend | None = None) -> AsyncIterator[tuple[Any, Toy]]:
    async with toy_server(engine, text=text or text_side()) as toy:
        base = f"{toy.http.base_url}/v1"
        http = DefaultAsyncHttpxClient(verify=False)
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, http_client=http) as openai:
            yield openai.chat.completions, toy


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


async def test_whole_answer_with_calls() -> None:
    async with client(Scripted(f"{THOUGHT}I look.\n{CALLS}")) as (chat, toy):
        reply = await chat.create(model="toy", messages=[USER], tools=[WEATHER])
        assert '"name": "weather"' in bytes(toy.engine.requests[0].prompt).decode()
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, calls_of(choice.message)) == ("I look.", EXPECTED)
    assert choice.message.reasoning_content == choice.message.reasoning == "Where? 日本"
    assert [call.type for call in choice.message.tool_calls] == ["function"] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_calls_alone_have_null_content() -> None:
    async with client(Scripted(CALLS)) as (chat, _):
        message = (await chat.create(model="toy", messages=[USER], tools=[WEATHER])).choices[0].message
    assert (message.content, calls_of(message)) == (None, EXPECTED)
    assert "reasoning" not in message.model_extra


@pytest.mark.parametrize("burst", [1, 3, 7, 1000])
async def test_a_stream_says_the_same(burst: int) -> None:
    async with client(Scripted(f"{THOUGHT}I look.\n{CALLS}", burst)) as (chat, _):
        stream = await chat.create(model="toy", messages=[USER], tools=[WEATHER], stream=True, n=2)
        chunks = [chunk async for chunk in stream]
    for index in range(2):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        content, reasoning, calls = read(choices)
        assert (content, reasoning, calls) == ("I look.", "Where? 日本", EXPECTED)
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def read(choices: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    content = "".join(choice.delta.content or "" for choice in choices)
    reasoning = "".join((choice.delta.model_extra or {}).get("reasoning_content", "") for choice in choices)
    calls: list[list[str]] = []
    for call in [call for choice in choices for call in choice.delta.tool_calls or ()]:
        if call.id:
            assert (call.index, call.type) == (len(calls), "function")
            calls.append([call.function.name, ""])
        calls[call.index][1] += call.function.arguments
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


async def test_arguments_come_before_the_call_is_whole() -> None:
    async with client(Scripted(CALLS)) as (chat, _):
        stream = await chat.create(model="toy", messages=[USER], tools=[WEATHER], stream=True)
        pieces = [call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert sum(piece.index == 0 for piece in pieces) > len('{"city": "Rome')


async def test_the_clients_own_assembly_of_a_stream() -> None:
    async with client(Scripted(CALLS, 5)) as (chat, _), chat.stream(model="toy", messages=[USER], tools=[WEATHER]) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert calls_of(message) == EXPECTED


async def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    for stream in (False, True):
        async with client(Scripted(CALLS, 4)) as (chat, _):
            reply = await chat.create(model="toy", messages=[USER], tools=[WEATHER], parallel_tool_calls=False, stream=stream)
            calls = read([c async for chunk in reply for c in chunk.choices])[2] if stream else calls_of(reply.choices[0].message)
        assert calls == EXPECTED[:1]


async def test_tool_choice_none_neither_shows_nor_reads_tools() -> None:
    async with client(Scripted(CALLS)) as (chat, toy):
        (choice,) = (await chat.create(model="toy", messages=[USER], tools=[WEATHER], tool_choice="none")).choices
        assert "weather" not in bytes(toy.engine.requests[0].prompt).decode()
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALLS, None, "stop")


async def test_forced_choices_ask_for_a_grammar() -> None:
    async with client(Scripted(CALLS)) as (chat, toy):
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}, "auto", "none"):
            await chat.create(model="toy", messages=[USER], tools=[WEATHER], tool_choice=choice)
        await chat.create(model="toy", messages=[USER], tools=[LOOSE])
        asked = [request.params.structured_outputs for request in toy.engine.requests]
        with pytest.raises(BadRequestError, match="'rain', which is not among the tools: weather"):
            await chat.create(model="toy", messages=[USER], tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "rain"}})
        with pytest.raises(BadRequestError, match="there are no tools"):
            await chat.create(model="toy", messages=[USER], tool_choice="required")
    assert [one and one.origin for one in asked] == ["tool_choice", "tool_choice", "tools", None, None]
    assert all(one.thinking.opens == ("<think>",) for one in asked[:3])


async def test_a_call_and_its_result_go_back_into_the_prompt() -> None:
    async with client(Scripted(CALLS)) as (chat, toy):
        message = (await chat.create(model="toy", messages=[USER], tools=[WEATHER])).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": f"{21 + i} degrees"} for i, call in enumerate(message.tool_calls)]
        await chat.create(model="toy", messages=[USER, message.model_dump(exclude_none=True), *results], tools=[WEATHER])
        prompt = bytes(toy.engine.requests[1].prompt).decode()
    assert '"city": "Rome é"' in prompt
    assert prompt.index("Oslo") < prompt.index("21 degrees") < prompt.index("22 degrees")


async def test_an_answer_cut_short_keeps_its_reason() -> None:
    async with client(Scripted(CALLS[:60], reason=FinishReason.LENGTH)) as (chat, _):
        (choice,) = (await chat.create(model="toy", messages=[USER], tools=[WEATHER])).choices
    assert choice.finish_reason == "length"
    assert CALLS.find(choice.message.tool_calls[0].function.arguments) > 0


async def test_reasoning_can_be_left_out() -> None:
    for stream in (False, True):
        async with client(Scripted(f"{THOUGHT}Yes", 4)) as (chat, _):
            reply = await chat.create(model="toy", messages=[USER], stream=stream, extra_body={"include_reasoning": False})
            if stream:
                choices = [c async for chunk in reply for c in chunk.choices]
                assert read(choices) == ("Yes", "", [])
            else:
                assert reply.choices[0].message.content == "Yes"
                assert "reasoning" not in reply.choices[0].message.model_extra


async def test_the_prompt_opens_the_reasoning() -> None:
    text = text_side("{{ messages[0].content }}<|assistant|><think>\n")
    async with client(Scripted("Hm.</think>Yes"), text) as (chat, _):
        message = (await chat.create(model="toy", messages=[USER])).choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", "Yes")


async def test_no_parser_leaves_the_text_alone() -> None:
    async with client(Scripted(THOUGHT + CALLS), text_side(tools="none", reasoning="none")) as (chat, _):
        assert (await chat.create(model="toy", messages=[USER])).choices[0].message.content == THOUGHT + CALLS
        with pytest.raises(BadRequestError, match="does not show them"):
            await chat.create(model="toy", messages=[USER], tools=[WEATHER])


async def test_marks_that_are_special_tokens_are_seen() -> None:
    class Tokenizer(ToyTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [BOS] if text == "<tool_call>" else super().encode(text, add_special_tokens=add_special_tokens)

    text = text_side()
    text = TextFrontend(Tokenizer(), text.template, text.answers)
    async with client(Scripted("x"), text) as (chat, toy):
        await chat.create(model="toy", messages=[USER], tools=[WEATHER])
        await chat.create(model="toy", messages=[USER])
        shown = [request.params.skip_special_tokens for request in toy.engine.requests]
    assert shown == [False, True]


async def test_the_terminal_shows_reasoning_as_a_local_model_writes_it() -> None:
    async with client(Scripted(f"{THOUGHT}Yes", 6)) as (_, toy):
        answers = RemoteTalker(Remote(toy.http, "toy"), "toy").chat([USER], {})
        texts = [answer.text async for answer in answers]
    assert texts[-1] == f"{THOUGHT}Yes"
