"""`/v1/responses` through the official client, each answer and event held against OpenAI's own document of its API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai_document import with_null
from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.responses_fit import fitting
from pagoda.serving.api.openai.responses_items import items_of
from pagoda.serving.api.openai.responses_protocol import ResponseRequest
from pagoda.serving.api.openai.responses_translate import chat_request
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.frontend.text import TextFrontend
from patience import eventually
from scripted import Scripted, text_side
from toy_engine import ToyEngine, toy_text
from toy_server import Toy, toy_server

DOCUMENT = Path(__file__).resolve().parents[3] / "shared/data/openai-openapi/openapi.json"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
THOUGHT = "<think>\nWhere? 日本\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
Check = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any] | None:
    return with_null(json.loads(DOCUMENT.read_text())["components"]) if DOCUMENT.is_file() else None


@pytest.fixture
def conforms(schemas: dict[str, Any] | None, require: Any) -> Check:
    require("OpenAI's API document", schemas is not None)
    validators: dict[str, Draft202012Validator] = {}

    def check(name: str, record: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": schemas}
        validator = validators.setdefault(name, Draft202012Validator(schema))
        problems = [(list(error.absolute_path), error.message[:300]) for error in validator.iter_errors(record)]
        assert not problems, (name, problems, record)

    return check


@asynccontextmanager
async def client(engine: ToyEngine, text: TextFrontend | None = None, key: str = "none", **flags: Any) -> AsyncIterator[tuple[Any, Toy]]:
    async with (
        toy_server(engine, text=text or text_side(), **flags) as toy,
        AsyncOpenAI(
            base_url=f"{toy.http.base_url}/v1", api_key=key, max_retries=0, http_client=DefaultAsyncHttpxClient(verify=False)
        ) as made,
    ):
        yield made.responses, toy


def prompt_of(toy: Toy, index: int = -1) -> str:
    return bytes(toy.engine.requests[index].prompt).decode()


EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.queued": "ResponseQueuedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
}


async def events_of(toy: Toy, **body: Any) -> list[dict[str, Any]]:
    response = await toy.http.post("/v1/responses", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    events = [event.split("\ndata: ") for event in response.text.split("\n\n") if event]
    records = [json.loads(data) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [record["type"] for record in records]
    assert [record["sequence_number"] for record in records] == list(range(len(records)))
    return records


async def test_a_whole_response(conforms: Check) -> None:
    async with client(Scripted(f"{THOUGHT}I look.\n{CALLS}")) as (responses, toy):
        reply = await responses.create(
            model="toy", input="Rome?", instructions="Be brief.", tools=[WEATHER], metadata={"a": "b"}, max_output_tokens=500
        )
        prompt = prompt_of(toy)
        conforms("Response", (await toy.http.get(f"/v1/responses/{reply.id}")).json())
    thought, _, first, second = reply.output
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (thought.content[0].text, reply.output_text) == ("Where? 日本", "I look.")
    assert [(call.name, json.loads(call.arguments)) for call in (first, second)] == [
        ("weather", {"city": "Rome é"}),
        ("weather", {"city": "Oslo"}),
    ]
    assert len({first.call_id, second.call_id, first.id, second.id}) == 4
    assert (reply.status, reply.metadata, reply.instructions) == ("completed", {"a": "b"}, "Be brief.")
    assert reply.usage.input_tokens == len(prompt.encode())
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
    assert "Be brief." in prompt and '"name": "weather"' in prompt


async def test_every_event_is_the_documents(conforms: Check) -> None:
    async with client(Scripted(f"{THOUGHT}Hm\n{CALLS}", 4)) as (_, toy):
        events = await events_of(toy, model="toy", input="Rome?", tools=[WEATHER])
    for event in events:
        conforms(EVENTS[event["type"]], event)
    shape = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith(".delta")]
    words = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    calls = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    said = [part.format(kind) for kind in ("reasoning_text", "output_text") for part in words]
    assert shape == ["created", "in_progress", *said, *calls, *calls, "completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]


async def test_an_answer_cut_short(conforms: Check) -> None:
    async with client(Scripted("one two", reason=FinishReason.LENGTH)) as (responses, toy):
        reply = await responses.create(model="toy", input="x", max_output_tokens=7)
        assert toy.engine.requests[0].params.max_tokens == 7
        events = await events_of(toy, model="toy", input="x")
    assert (reply.status, reply.incomplete_details.reason, reply.output[0].status) == ("incomplete", "max_output_tokens", "incomplete")
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    conforms("ResponseIncompleteEvent", events[-1])


async def test_a_stream_that_fails(conforms: Check) -> None:
    engine = Scripted("x" * 50, held=9)
    async with client(engine) as (responses, _):
        stream = await responses.create(model="toy", input="x", stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                engine.dead = "gone"
        with pytest.raises(openai.InternalServerError):
            await responses.create(model="toy", input="x", stream=True)
    last = events[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    conforms("ResponseFailedEvent", last.to_dict())


PIECES = st.lists(st.sampled_from(["Hi ", "é日", "\n", "{", "<tool_call>", "</tool_call>", CALLS[:70], CALLS, '"x"']), max_size=6)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(thought=st.sampled_from(["", THOUGHT, "<think>cut"]), pieces=PIECES, burst=st.integers(1, 9), seed=st.integers(0, 9))
async def test_a_stream_says_what_the_whole_response_says(thought: str, pieces: list[str], burst: int, seed: int) -> None:
    async with client(Scripted(thought + "".join(pieces), burst)) as (responses, _):
        fields = {"model": "toy", "input": "Rome?", "tools": [WEATHER], "extra_body": {"seed": seed}}
        whole = await responses.create(**fields)
        async with responses.stream(**fields) as stream:
            streamed = await stream.get_final_response()
    assert told(streamed) == told(whole)


def told(response: Any) -> dict[str, Any]:
    record = response.to_dict()
    for name in ("id", "created_at", "completed_at"):
        record.pop(name)
    record["output"] = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in record["output"]]
    for item in record["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return record


async def test_items_reach_the_template() -> None:
    items = [
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"type": "message", "role": "user", "content": "Rome?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look."}], "id": "rs_1"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Röme"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "22 degrees"}]},
        {"role": "user", "content": "So?"},
    ]
    source = "{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    async with client(Scripted("x"), text_side(source)) as (responses, toy):
        await responses.create(model="toy", input=items, instructions="Be brief.")
        messages = json.loads("[" + prompt_of(toy).replace("][", ",").strip("[]") + "]")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert messages[0]["content"] == "Be brief.\nBe exact."
    assert messages[1]["content"] == "One\nRome?"
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("Wait.", "Look.")
    assert messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Röme"}}
    assert [message["content"] for message in messages[3:]] == ["21 degrees", "22 degrees", "So?"]


async def test_a_conversation_goes_on_by_id() -> None:
    async with client(Scripted(f"{THOUGHT}Lovely.")) as (responses, toy):
        first = await responses.create(model="toy", input="Rome?", instructions="Rhyme.")
        second = await responses.create(model="toy", input="And Oslo?", previous_response_id=first.id)
        prompt = prompt_of(toy)
        page = await responses.input_items.list(second.id, order="asc")
        newest = await responses.input_items.list(second.id, limit=1)
        rest = await responses.input_items.list(second.id, after=newest.data[0].id)
    assert "Rhyme." not in prompt
    assert prompt.index("Rome?") < prompt.index("Lovely.") < prompt.index("And Oslo?")
    assert second.previous_response_id == first.id
    assert [item.type for item in page.data] == ["message", "reasoning", "message", "message"]
    assert (newest.data[0].content[0].text, newest.has_more) == ("And Oslo?", True)
    assert [item.id for item in rest.data] == [item.id for item in page.data[:3]][::-1]


async def test_input_items_are_the_documents(conforms: Check) -> None:
    items = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "Wait."},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "21"},
    ]
    async with client(Scripted("x")) as (responses, toy):
        reply = await responses.create(model="toy", input=items)
        listed = (await toy.http.get(f"/v1/responses/{reply.id}/input_items")).json()
        for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
            assert (await toy.http.get(f"/v1/responses/{reply.id}/input_items?{query}")).status_code == 400
    assert len(listed["data"]) == 4
    conforms("ResponseItemList", listed)


async def test_responses_are_kept_within_bounds() -> None:
    async with client(Scripted("x"), max_stored_responses=2) as (responses, _):
        ids = [(await responses.create(model="toy", input=str(i))).id for i in range(2)]
        await responses.retrieve(ids[0])
        ids.append((await responses.create(model="toy", input="2")).id)
        assert [await found(responses, one) for one in ids] == [True, False, True]
        unkept = await responses.create(model="toy", input="x", store=False)
        assert (unkept.store, await found(responses, unkept.id)) == (False, False)
        await responses.delete(ids[0])
        assert not await found(responses, ids[0])
        with pytest.raises(openai.NotFoundError) as gone:
            await responses.create(model="toy", input="x", previous_response_id=ids[1])
        assert gone.value.body["code"] == "previous_response_not_found"
    async with client(Scripted("x"), max_stored_responses=0) as (responses, _):
        assert (await responses.create(model="toy", input="x")).store is False
        with pytest.raises(openai.BadRequestError, match="--max-stored-responses 0"):
            await responses.create(model="toy", input="x", store=True)


async def found(responses: Any, response_id: str) -> bool:
    try:
        return (await responses.retrieve(response_id)).id == response_id
    except openai.NotFoundError:
        return False


async def test_another_key_finds_nothing() -> None:
    async with client(Scripted("x"), key="a", api_key=("a", "b")) as (responses, toy):
        mine = await responses.create(model="toy", input="x")
        assert await found(responses, mine.id)
        async with AsyncOpenAI(base_url=f"{toy.http.base_url}/v1", api_key="b", max_retries=0) as stranger:
            theirs = stranger.responses
            for call in (theirs.retrieve, theirs.delete, theirs.cancel, theirs.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await call(mine.id)
            with pytest.raises(openai.NotFoundError):
                await theirs.create(model="toy", input="x", previous_response_id=mine.id)
        assert await found(responses, mine.id)


async def test_in_the_background(conforms: Check) -> None:
    async with client(Scripted("done", held=2)) as (responses, toy):
        begun = await responses.create(model="toy", input="x", background=True)
        assert begun.status == "queued"
        conforms("Response", begun.to_dict())
        with pytest.raises(openai.BadRequestError, match="still being made"):
            await responses.create(model="toy", input="x", previous_response_id=begun.id)
        toy.engine.held, reply = None, begun
        while reply.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            reply = await responses.retrieve(begun.id)
        assert (reply.status, reply.output_text) == ("completed", "done")
        assert (await responses.cancel(begun.id)).status == "completed"
        plain = await responses.create(model="toy", input="x")
        with pytest.raises(openai.BadRequestError, match="background=true can be cancelled"):
            await responses.cancel(plain.id)
        toy.engine.dead = "gone"
        failed = await responses.create(model="toy", input="x", background=True)
        while failed.status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
            failed = await responses.retrieve(failed.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")


async def test_a_stream_in_the_background_is_followed_from_any_of_its_events(conforms: Check) -> None:
    async with client(Scripted(f"{THOUGHT}Hm\n{CALLS}", 4, held=2)) as (responses, toy):
        begun = await responses.create(model="toy", input="Rome?", tools=[WEATHER], background=True, stream=True)
        first = [await anext(begun) for _ in range(3)]
        await begun.close()
        response_id = first[0].response.id
        follower = await responses.retrieve(response_id, stream=True, starting_after=1)
        toy.engine.held = None
        rest = [event async for event in follower]
        events = [event.to_dict() async for event in await responses.retrieve(response_id, stream=True)]
        none = [event async for event in await responses.retrieve(response_id, stream=True, starting_after=len(events) - 1)]
        whole = (await responses.retrieve(response_id)).to_dict()
        plain = await responses.create(model="toy", input="x", background=True)
        for query in ("stream=true", "stream=true&starting_after=x"):
            one = plain.id if query == "stream=true" else response_id
            assert (await toy.http.get(f"/v1/responses/{one}?{query}")).status_code == 400
    for event in events:
        conforms(EVENTS[event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.to_dict() for event in first] == events[:3] and [event.to_dict() for event in rest] == events[2:] and none == []
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1]["type"] == "response.completed" and events[-1]["response"] == whole


async def test_a_stream_in_the_background_ends_when_it_is_cancelled_or_deleted(conforms: Check) -> None:
    async with client(Scripted("x" * 500, held=9)) as (responses, _):
        begun = await responses.create(model="toy", input="x", background=True, stream=True)
        response_id = (await anext(begun)).response.id
        await responses.cancel(response_id)
        events = [event.to_dict() async for event in begun]
        conforms("ResponseIncompleteEvent", events[-1])
        assert events[-1]["response"]["status"] == "cancelled"
        other = await responses.create(model="toy", input="x", background=True, stream=True)
        await responses.delete((await anext(other)).response.id)
        with pytest.raises(openai.APIError, match="not kept here"):
            _ = [event async for event in other]


async def test_logprobs_come_with_the_texts_tokens(conforms: Check) -> None:
    fields = {"model": "toy", "input": "hé", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with client(ToyEngine(burst=3), toy_text()) as (responses, toy):
        whole = (await responses.create(**fields)).to_dict()
        events = await events_of(toy, **fields)
        without = await responses.create(model="toy", input="hé")
    for event in events:
        conforms(EVENTS[event["type"]], event)
    conforms("Response", whole)
    (part,) = whole["output"][0]["content"]
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode() == part["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    streamed = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert streamed == done["logprobs"] == part["logprobs"] == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert without.output[0].content[0].logprobs == []


async def test_logprobs_do_not_depend_on_how_tokens_come() -> None:
    said = []
    for burst in (1, 3, 100):
        async with client(ToyEngine(burst=burst), toy_text()) as (responses, _):
            fields = {"model": "toy", "input": "<think>é</think>hé日本, so on", "include": ["message.output_text.logprobs"]}
            for more in ({}, {"stop": "so"}, {"max_output_tokens": 24}):
                reply = await responses.create(**fields, extra_body=more)
                said.append((burst, str(more), [item.to_dict() for item in reply.output]))
    for _, _, items in said:
        for item in items:
            item.pop("id")
    assert [one[1:] for one in said[:3]] == [one[1:] for one in said[3:6]] == [one[1:] for one in said[6:]]
    assert all(item["content"][0]["logprobs"] for _, _, items in said for item in items if item["type"] == "message")


async def test_a_long_conversation_leaves_out_its_beginning_where_it_may() -> None:
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Old? " * 60}]
    items += [
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "word " * 200},
    ]
    items += [{"role": "user", "content": f"Question {i}?"} for i in range(9)]
    async with client(Scripted("x")) as (responses, toy):
        longest = toy.engine.facts.max_model_len
        with pytest.raises(openai.BadRequestError, match="tokens"):
            await responses.create(model="toy", input=items * 4, max_output_tokens=50)
        for times in (1, 4, 9):
            reply = await responses.create(model="toy", input=items * times, max_output_tokens=50, truncation="auto")
            prompt = prompt_of(toy)
            counted = await responses.input_tokens.count(model="toy", input=items * times, truncation="auto")
            assert reply.truncation == "auto" and reply.usage.input_tokens == len(prompt.encode()) <= longest - 50
            assert "Be brief." in prompt and "Question 8?" in prompt and len(prompt) > 1000
            assert counted.input_tokens <= longest
        with pytest.raises(openai.BadRequestError, match="tokens"):
            await responses.create(model="toy", input=[*items, {"role": "user", "content": "x" * longest}], truncation="auto")


@pytest.mark.parametrize("room", range(1, 60, 3))
async def test_of_a_conversation_the_most_of_its_end_is_kept_without_results_of_lost_calls(room: int) -> None:
    kinds = ["system", "user", "call", "result", "user", "developer", "call", "call", "result", "result", "user", "assistant", "user"]
    calls = iter(["a", "b", "c"])
    results = iter(["a", "c", "b"])
    items: list[dict[str, Any]] = []
    for place, kind in enumerate(kinds):
        if kind == "call":
            items.append({"type": "function_call", "call_id": next(calls), "size": 3 + place % 4})
        elif kind == "result":
            items.append({"type": "function_call_output", "call_id": next(results), "size": 2 + place % 5})
        else:
            items.append({"type": "message", "role": kind, "size": 1 + place % 3, "id": place})

    def size(some: Any) -> int:
        return sum(item["size"] for item in some)

    async def fits(some: Any) -> bool:
        if size(some) > 50:
            raise RequestError("longer than any context", code="context_length_exceeded")
        return size(some) <= room

    kept = await fitting(items, fits)
    known = {item["call_id"] for item in kept if item["type"] == "function_call"}
    assert all(item["call_id"] in known for item in kept if item["type"] == "function_call_output")
    assert [item for item in kept if item.get("role") in ("system", "developer")] == [items[0], items[5]]
    assert kept[-1] == items[-1] and [item for item in items if item in kept] == list(kept)
    first = next((place for place, item in enumerate(items) if item in kept and item.get("role") not in ("system", "developer")), 0)
    if size(kept) > room:
        assert len(kept) == 3  # nothing fits
    elif first > 1:
        assert size([*kept, items[first - 1]]) > room or items[first - 1]["type"] != "message"


async def test_input_tokens_are_counted(conforms: Check) -> None:
    async with client(Scripted("x")) as (responses, toy):
        reply = await responses.create(model="toy", input="Rome?", instructions="Be brief.", tools=[WEATHER])
        counted = await responses.input_tokens.count(model="toy", input="Rome?", instructions="Be brief.", tools=[WEATHER])
        conforms("TokenCountsResource", counted.to_dict())
        assert counted.input_tokens == reply.usage.input_tokens
        more = await responses.input_tokens.count(model="toy", input="Oslo?", previous_response_id=reply.id)
    assert more.input_tokens > len("Rome?Oslo?") and len(toy.engine.requests) == 1


async def test_cancelling_ends_the_request(conforms: Check) -> None:
    async with client(Scripted("x" * 500, held=9), max_stored_responses=1) as (responses, toy):
        begun = await responses.create(model="toy", input="x", background=True)
        with pytest.raises(openai.RateLimitError, match="run in the background"):
            await responses.create(model="toy", input="x", background=True)
        while (await responses.retrieve(begun.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        ended = await responses.cancel(begun.id)
        conforms("Response", ended.to_dict())
        assert (ended.status, ended.output[0].status) == ("cancelled", "incomplete")
        again = await responses.create(model="toy", input="x", background=True)
        await eventually(lambda: toy.engine.live)
        await responses.delete(again.id)
        await eventually(lambda: not toy.engine.live)
        assert not await found(responses, again.id)
        assert (len(toy.engine.aborted), toy.engine.live) == (2, {})


async def test_a_key_has_its_share_of_the_background() -> None:
    flags = {"key_max_requests": 1, "api_key": ("a", "b")}
    async with client(Scripted("x" * 500, held=9), key="a", **flags) as (responses, toy):
        first = await responses.create(model="toy", input="x", background=True)
        with pytest.raises(openai.RateLimitError, match="of this key run in the background"):
            await responses.create(model="toy", input="x", background=True)
        headers = {"authorization": "Bearer b"}
        other = await toy.http.post("/v1/responses", json={"input": "x", "background": True}, headers=headers)
        assert other.status_code == 200
        for key, one in (("a", first.id), ("b", other.json()["id"])):
            await toy.http.post(f"/v1/responses/{one}/cancel", headers={"authorization": f"Bearer {key}"})


async def test_leaving_ends_the_request() -> None:
    async with client(Scripted("x" * 500, held=9)) as (responses, toy):
        stream = await responses.create(model="toy", input="x", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await eventually(lambda: toy.engine.aborted)
    assert len(toy.engine.aborted) == 1


async def test_reasoning_can_be_turned_off_in_the_template() -> None:
    async with client(Scripted("x"), text_side("{{ enable_thinking }}|{{ reasoning_effort }}|{{ verbosity }}|<think></think>")) as (
        responses,
        toy,
    ):
        await responses.create(model="toy", input="x", reasoning={"effort": "none"})
        assert prompt_of(toy).startswith("False|none")
        await responses.create(
            model="toy", input="x", reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"]
        )
        assert prompt_of(toy).startswith("|low")
        said = await responses.create(model="toy", input="x", text={"verbosity": "low"})
        assert said.text.verbosity == "low" and prompt_of(toy).startswith("||low|")


async def test_a_schema_reaches_the_engine(require: Any) -> None:
    require("xgrammar", find_spec("xgrammar") is not None)
    schema = {"type": "object", "properties": {"city": {"type": "string", "title": "a city"}}}
    form = {"type": "json_schema", "name": "city", "schema": schema, "strict": True}
    async with client(Scripted('{"city": "Rome"}')) as (responses, toy):
        reply = await responses.create(model="toy", input="x", text={"format": form})
        assert '"a city"' in str(toy.engine.requests[0].params) or "'a city'" in str(toy.engine.requests[0].params)
    assert reply.output_text == '{"city": "Rome"}'
    assert reply.text.format.name == "city"


def test_choices_go_on_to_chat() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, wanted in (
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, named),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}},
        ),
    ):
        body = ResponseRequest(input="x", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        chat = chat_request(body, items_of(body.input))
        assert (chat.tool_choice, chat.parallel_tool_calls) == (wanted, False)
    assert chat.tools == [{"type": "function", "function": {name: value for name, value in WEATHER.items() if name != "type"}}]


WRONG: dict[str, dict[str, Any]] = {
    "input": {"input": []},
    "input[0].content[0]": {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]},
    "input[1]": {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]},
    "tools[0]": {"tools": [{"type": "web_search"}]},
    "max_output_tokens": {"max_output_tokens": 100_000},
    "temperature": {"temperature": -1},
    "conversation": {"conversation": "conv_1"},
    "top_logprobs": {"top_logprobs": 999, "include": ["message.output_text.logprobs"]},
    "include": {"include": ["everything"]},
    "truncation": {"truncation": "middle"},
    "background": {"background": True, "store": False},
    "text.format": {"text": {"format": {"type": "xml"}}},
    "model": {"model": "nobody"},
}


@pytest.mark.parametrize("param", WRONG)
async def test_what_is_wrong_is_named(param: str, conforms: Check) -> None:
    async with client(Scripted("x")) as (_, toy):
        response = await toy.http.post("/v1/responses", json={"model": "toy", "input": "x", **WRONG[param]})
    assert (response.status_code, response.json()["error"]["param"]) == (404 if param == "model" else 400, param), response.text
    conforms("ErrorResponse", response.json())
    if param == "max_output_tokens":
        assert "max_output_tokens=100000" in response.json()["error"]["message"]
