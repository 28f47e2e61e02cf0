"""Every public call of the official clients on what is served here, over HTTP; what is not served is a 404 that says so."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from anthropic import beta_async_tool
from patience import eventually
from pydantic import BaseModel
from scripted import Scripted, text_side
from toy_server import toy_server

USER = {"role": "user", "content": "Rome?"}
ASKED: dict[str, Any] = {"model": "toy", "messages": [USER]}
SAID: dict[str, Any] = {"model": "toy", "max_tokens": 64, "messages": [USER]}


class City(BaseModel):
    """What the scripted answer holds."""

    city: str


ANSWER = '{"city": "Rome"}'


@asynccontextmanager
async def clients() -> AsyncIterator[tuple[openai.AsyncOpenAI, anthropic.AsyncAnthropic]]:
    """Both, of a server that always says `ANSWER`."""
    async with toy_server(Scripted(ANSWER), text=text_side()) as toy:
        theirs = openai.AsyncOpenAI(
            base_url=f"{toy.http.base_url}/v1", api_key="k", max_retries=0, http_client=openai.DefaultAsyncHttpxClient(verify=False)
        )
        other = anthropic.AsyncAnthropic(
            base_url=str(toy.http.base_url), api_key="k", max_retries=0, http_client=anthropic.DefaultAsyncHttpxClient(verify=False)
        )
        async with theirs, other:
            yield theirs, other


Call = Callable[[Any], Awaitable[Any]]


async def _chunks(client: Any) -> None:
    stream = await client.chat.completions.create(**ASKED, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == ANSWER


async def _created(client: Any) -> None:
    assert (await client.chat.completions.create(**ASKED)).choices[0].message.content == ANSWER
    await _chunks(client)


async def _parsed(client: Any) -> None:
    assert (await client.chat.completions.parse(**ASKED, response_format=City)).choices[0].message.parsed == City(city="Rome")


async def _streamed(client: Any) -> None:
    async with client.chat.completions.stream(**ASKED, response_format=City) as stream:
        kinds = {event.type async for event in stream}
        assert (await stream.get_final_completion()).choices[0].message.parsed == City(city="Rome")
    assert {"chunk", "content.delta", "content.done"} <= kinds


async def _completed(client: Any) -> None:
    assert (await client.completions.create(model="toy", prompt="x", max_tokens=64)).choices[0].text == ANSWER
    stream = await client.completions.create(model="toy", prompt="x", max_tokens=64, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == ANSWER


async def _response(client: Any) -> Any:
    made = await client.responses.create(model="toy", input="Rome?")
    assert made.output_text == ANSWER
    return made


async def _response_parsed(client: Any) -> None:
    assert (await client.responses.parse(model="toy", input="Rome?", text_format=City)).output_parsed == City(city="Rome")


async def _response_streamed(client: Any) -> None:
    async with client.responses.stream(model="toy", input="Rome?", text_format=City) as stream:
        assert [event.type async for event in stream][-1] == "response.completed"
        assert (await stream.get_final_response()).output_parsed == City(city="Rome")


async def _response_found(client: Any) -> None:
    made = await _response(client)
    assert (await client.responses.retrieve(made.id)).output_text == ANSWER


async def _response_forgotten(client: Any) -> None:
    made = await _response(client)
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def _response_cancelled(client: Any) -> None:
    made = await client.responses.create(model="toy", input="Rome?", background=True)
    assert (await client.responses.cancel(made.id)).status in ("cancelled", "completed")


async def _given(client: Any) -> None:
    made = await _response(client)
    (item,) = (await client.responses.input_items.list(made.id)).data
    assert item.content[0].text == "Rome?"


async def _counted(client: Any) -> None:
    assert (await client.responses.input_tokens.count(model="toy", input="Rome?")).input_tokens > 0


async def _listed(client: Any) -> None:
    assert "toy" in [model.id async for model in client.models.list()]


async def _looked_up(client: Any) -> None:
    assert (await client.models.retrieve("toy")).id == "toy"


OPENAI: dict[str, dict[str, Call | None]] = {
    "completions": {"create": _completed},
    "chat.completions": {
        "create": _created, "parse": _parsed, "stream": _streamed,
        "list": None, "retrieve": None, "update": None, "delete": None,
    },
    "responses": {
        "create": _response, "parse": _response_parsed, "stream": _response_streamed, "retrieve": _response_found,
        "delete": _response_forgotten, "cancel": _response_cancelled, "compact": None, "connect": None,
    },
    "responses.input_items": {"list": _given},
    "responses.input_tokens": {"count": _counted},
    "models": {"list": _listed, "retrieve": _looked_up, "delete": None},
}  # fmt: skip
"""By resource and call; None where there is no such endpoint here. Embeddings and audio have servers of their own in tests/e2e."""


async def _message(client: Any) -> None:
    assert (await client.messages.create(**SAID)).content[0].text == ANSWER
    stream = await client.messages.create(**SAID, stream=True)
    assert [event.type async for event in stream][-1] == "message_stop"


async def _message_parsed(client: Any) -> None:
    assert (await client.messages.parse(**SAID, output_format=City)).parsed_output == City(city="Rome")


async def _message_streamed(client: Any) -> None:
    async with client.messages.stream(**SAID) as stream:
        assert await stream.get_final_text() == ANSWER


async def _message_counted(client: Any) -> None:
    assert (await client.messages.count_tokens(model="toy", messages=[USER])).input_tokens > 0


ANTHROPIC: dict[str, dict[str, Call | None]] = {
    "messages": {"create": _message, "parse": _message_parsed, "stream": _message_streamed, "count_tokens": _message_counted},
    "models": {"list": _listed, "retrieve": _looked_up},
}


def _public(resource: Any) -> set[str]:
    """Calls, without the wrappers that every resource has, and without resources below it."""
    return {name for name in dir(resource) if not name.startswith(("_", "with_")) and inspect.ismethod(getattr(resource, name))}


def _at(client: Any, path: str) -> Any:
    for name in path.split("."):
        client = getattr(client, name)
    return client


def test_no_call_is_left_out() -> None:
    theirs, other = openai.AsyncOpenAI(api_key="k", base_url="http://x"), anthropic.AsyncAnthropic(api_key="k")
    for client, table in ((theirs, OPENAI), (other, ANTHROPIC)):
        for path, calls in table.items():
            assert _public(_at(client, path)) - {"batches"} == set(calls), path


@pytest.mark.parametrize("call", [call for calls in OPENAI.values() for call in calls.values() if call], ids=lambda call: call.__name__)
async def test_openais_calls(call: Call) -> None:
    async with clients() as (client, _):
        await call(client)


@pytest.mark.parametrize("call", [call for calls in ANTHROPIC.values() for call in calls.values() if call], ids=lambda call: call.__name__)
async def test_anthropics_calls(call: Call) -> None:
    async with clients() as (_, client):
        await call(client)


async def test_what_is_not_served_is_not_found() -> None:
    async with clients() as (client, other):
        for absent in (
            client.chat.completions.retrieve("chatcmpl-1"),
            client.chat.completions.delete("chatcmpl-1"),
            client.responses.compact(model="toy", input="x"),
            client.audio.speech.create(model="toy", input="x", voice="alloy"),
            client.images.generate(model="toy", prompt="x"),
            client.moderations.create(input="x"),
            client.files.list(),
            client.batches.list(),
        ):
            with pytest.raises((openai.NotFoundError, openai.APIStatusError)) as told:
                await absent
            assert told.value.status_code in (404, 405), told.value
        with pytest.raises(anthropic.APIStatusError) as refused:
            await other.messages.batches.create(requests=[])
        assert refused.value.status_code == 404


async def test_raw_and_streaming_answers_and_tools() -> None:
    async with clients() as (client, other):
        raw = await client.chat.completions.with_raw_response.create(**ASKED)
        assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == ANSWER
        async with client.chat.completions.with_streaming_response.create(**ASKED) as streaming:
            assert ANSWER.replace('"', '\\"') in await streaming.text()
        assert (await other.messages.with_raw_response.create(**SAID)).headers["x-request-id"]

        @beta_async_tool
        async def weather(city: str) -> str:
            """The weather of a city."""
            return f"fine in {city}"

        runner = other.beta.messages.tool_runner(**SAID, tools=[weather])
        assert (await runner.until_done()).content[0].text == ANSWER


async def test_a_call_that_a_client_leaves_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with toy_server(Scripted(ANSWER, held=3), text=text_side()) as toy:
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{toy.http.base_url}/v1", api_key="k", max_retries=0, http_client=http, timeout=0.3
        ) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**ASKED)
        await eventually(lambda: not toy.service.load, "for the request's end")
