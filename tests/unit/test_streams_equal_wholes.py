"""Streamed and whole answers carry the same content: every endpoint that streams, every parser, whatever the model writes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from assembled import both
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.frontend.parsers.choose import BUILT_IN, families
from scripted import Scripted, text_side
from toy_engine import ToyEngine
from toy_server import toy_server

TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
USER = [{"role": "user", "content": "Rome?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "tools": [{"type": "function", "function": TOOL}], "n": 2, "return_token_ids": True},
    "/v1/responses": {"input": "Rome?", "tools": [{"type": "function", **TOOL}]},
    "/v1/messages": {
        "model": "toy", "max_tokens": 999, "messages": USER, "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}]
    },
}  # fmt: skip
WORDS = [mark for family in BUILT_IN for mark in family.marks] + [
    *(
        '{"name": "weather"',
        ', "arguments": {"city": "é日"}',
        "{",
        "}",
        "[",
        "]",
        ",",
        " ",
        "\n",
        '"',
        "weather(",
        "city='x'",
        ")",
        "Hi ",
        "👍🏽",
    ),
    *("<function=weather>", "<parameter=city>", "</parameter>", "</function>", "```json", "functools"),
]
names = {
    kind: st.sampled_from([*(family.names[0] for family in families(kind) if "hf" not in family.names), "none"])
    for kind in ("tools", "reasoning")
}


@pytest.mark.heavy
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(sorted(BODIES)),
    tools=names["tools"],
    reasoning=names["reasoning"],
    words=st.lists(st.sampled_from(WORDS), max_size=12),
    burst=st.integers(1, 40),
    ending=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    stop=st.sampled_from([None, None, "}", "Hi"]),
)
def test_parsers_on_every_endpoint(
    path: str, tools: str, reasoning: str, words: list[str], burst: int, ending: FinishReason, stop: str | None
) -> None:
    async def ask() -> tuple[Any, Any]:
        engine = Scripted("".join(words) or "x", burst, ending)
        async with toy_server(engine, text=text_side(tools=tools, reasoning=reasoning)) as toy:
            body = dict(BODIES[path])
            if tools == "none":
                body.pop("tools")
            if stop is not None:
                body |= {"stop_sequences": [stop]} if path == "/v1/messages" else {"stop": stop}
            return await both(toy.http, path, body)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed


@pytest.mark.heavy
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/v1/completions", "/inference/v1/generate"]),
    prompt=st.text(min_size=1, max_size=12),
    burst=st.integers(1, 9),
    fields=st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 20), "n": st.integers(1, 3), "logprobs": st.sampled_from([None, 0, 2])},
        optional={
            "stop": st.text(min_size=1, max_size=2),
            "echo": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "ignore_eos": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "return_token_ids": st.booleans(),
            "stop_token_ids": st.lists(st.integers(32, 120), max_size=2),
        },
    ),
)
def test_texts_and_token_ids(path: str, prompt: str, burst: int, fields: dict[str, Any]) -> None:
    async def ask() -> tuple[Any, Any]:
        async with toy_server(ToyEngine(burst=burst)) as toy:
            if path == "/v1/completions":
                return await both(toy.http, path, {"prompt": prompt, **fields})
            settings = {name: value for name, value in fields.items() if name not in ("echo", "return_token_ids")}
            return await both(toy.http, path, {"token_ids": list(prompt.encode()), "sampling_params": settings})

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
