"""The fields of requests that say what an answer must look like, as they reach the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.structured import StructuredOutputsParams
from scripted import text_side
from toy_server import toy_server

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
TEXT = json.dumps(SCHEMA)
FIELDS: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": None}, None),
    ({"response_format": FORMAT}, StructuredOutputsParams(json=TEXT, origin="response_format")),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True, origin="response_format")),
    ({"response_format": TAG}, StructuredOutputsParams(structural_tag=json.dumps(TAG), origin="response_format")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutputsParams(json=TEXT, disable_any_whitespace=True),
    ),
    ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, StructuredOutputsParams(choice=("a", "b"))),
    ({"guided_json": SCHEMA}, StructuredOutputsParams(json=TEXT, origin="guided_json")),
    ({"guided_json": {}}, StructuredOutputsParams(json="{}", origin="guided_json")),
    ({"guided_regex": "a+"}, StructuredOutputsParams(regex="a+", origin="guided_regex")),
    ({"guided_choice": ["a"]}, StructuredOutputsParams(choice=("a",), origin="guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutputsParams(grammar='root ::= "a"', origin="guided_grammar")),
]


@pytest.mark.parametrize(("fields", "expected"), FIELDS)
async def test_a_field_reaches_the_engine(fields: dict[str, Any], expected: StructuredOutputsParams | None) -> None:
    async with toy_server() as toy:
        assert (await toy.chat("x", **fields)).status_code == 200
        assert (await toy.complete("x", **fields)).status_code == 200
        assert [request.params.structured_outputs for request in toy.engine.requests] == [expected] * 2


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "response_format and guided_regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"jsonn": {}}}, "structured_outputs", "no key 'jsonn'"),
        ({"guided_choice": []}, "guided_choice", "list of texts"),
        ({"structured_outputs": {"choice": "ab"}}, "structured_outputs", "list of texts"),
        ({"structured_outputs": {"json_object": 2147483648}}, "structured_outputs", "json_object is int; it must be true or false"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": "x"}}, "structured_outputs", "disable_any_whitespace is str"),
        ({"structured_outputs": {"regex": "a", "disable_additional_properties": []}}, "structured_outputs", "is list"),
    ],
)
async def test_a_wrong_field_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    async with toy_server() as toy:
        for reply in (await toy.chat("x", **fields), await toy.complete("x", **fields)):
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
            assert message in reply.json()["error"]["message"]


async def test_a_text_that_is_no_schema_is_refused_beside_tools_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with toy_server(text=text_side()) as toy:
        for text in ("x", "[" * 100_000):
            for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
                body = {"messages": [{"role": "user", "content": "x"}], "guided_json": text, "tools": tools}
                reply = await toy.http.post(path, json=body)
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, "guided_json")
                assert "is no JSON" in reply.json()["error"]["message"]


async def test_without_the_packages_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.serving.api.openai.structured.installed", lambda: False)
    async with toy_server() as toy:
        reply = await toy.chat("x", response_format=FORMAT)
    assert reply.status_code == 400
    assert "pagoda-llm[structured]" in reply.json()["error"]["message"]


def test_the_sdk_takes_a_mapping_too() -> None:
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
