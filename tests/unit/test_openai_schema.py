"""Answers, stream events and errors against OpenAI's own document of its API, and its request examples against this server."""

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from openai_document import with_null
from pagoda.serving.frontend.chat_template import ChatTemplate
from pagoda.serving.frontend.text import TextFrontend
from scripted import Scripted, text_side
from toy_engine import ToyEngine, ToyTokenizer
from toy_server import events, toy_server

DOCUMENT = Path(__file__).resolve().parents[3] / "shared/data/openai-openapi/openapi.json"
MESSAGES = [{"role": "user", "content": "hé"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def document():
    return json.loads(DOCUMENT.read_text()) if DOCUMENT.is_file() else None


@pytest.fixture
def conforms(document, require):
    require("OpenAI's API document", document is not None)
    schemas = with_null(document["components"])

    def check(name, record, *, part=False):
        if part and name == "CreateCompletionResponse":  # of chunks the document shows null, but its schema wants a reason
            record = {**record, "choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in record["choices"]]}
        validator = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": schemas})
        problems = [(list(error.absolute_path), error.message[:200]) for error in validator.iter_errors(record)]
        assert not problems, (name, problems)

    return check


async def test_answers(conforms):
    async with toy_server() as toy:
        for fields in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 2}, {"stop": ":"}):
            conforms("CreateChatCompletionResponse", (await toy.chat("hé", **fields)).json())
        for fields in ({}, {"n": 2, "best_of": 3}, {"logprobs": 2}, {"max_tokens": 2}, {"echo": True}):
            conforms("CreateCompletionResponse", (await toy.complete("hé", **fields)).json())
        conforms("ListModelsResponse", (await toy.http.get("/v1/models")).json())
        conforms("Model", (await toy.http.get("/v1/models/toy")).json())


async def test_stream_events(conforms):
    async with toy_server() as toy:
        for fields in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}, {"stream_options": {"include_usage": True}}):
            for chunk in await toy.stream("/v1/chat/completions", messages=MESSAGES, **fields):
                conforms("CreateChatCompletionStreamResponse", chunk)
        for chunk in await toy.stream(prompt="hé", n=2, logprobs=1):
            conforms("CreateCompletionResponse", chunk, part=True)


async def test_errors(conforms):
    async with toy_server(ToyEngine(), api_key=("k",)) as toy:
        conforms("ErrorResponse", (await toy.chat()).json())
        toy.http.headers["authorization"] = "Bearer k"
        for response in (await toy.chat(temperature=9e9), await toy.chat(model="x"), await toy.http.get("/nothing")):
            assert response.status_code >= 400
            conforms("ErrorResponse", response.json())


async def test_request_examples_are_answered_or_refused_by_name(document, conforms):
    refused = {}
    async with toy_server() as toy:
        template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
        toy.service.text = TextFrontend(ToyTokenizer(), ChatTemplate({"default": template}, {}))
        for path, answer, chunk in (
            ("/chat/completions", "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
            ("/completions", "CreateCompletionResponse", "CreateCompletionResponse"),
        ):
            for example in document["paths"][path]["post"]["x-oaiMeta"]["examples"]:
                body = json.loads(re.search(r"-d '(.*)'", example["request"]["curl"], re.DOTALL)[1])
                body["model"] = "toy"
                response = await toy.http.post("/v1" + path, json=body)
                if response.status_code == 400:
                    conforms("ErrorResponse", response.json())
                    refused[example["title"]] = response.json()["error"]["param"]
                elif body.get("stream"):
                    for record in events(response.text):
                        conforms(chunk, record, part=True)
                else:
                    assert response.status_code == 200
                    conforms(answer, response.json())
    assert refused == {"Functions": "tools", "Image input": "messages"}


@pytest.mark.parametrize("burst", [1, 5, 1000])
async def test_calls_and_thoughts(conforms, burst):
    script = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
    async with toy_server(Scripted(script, burst), text=text_side()) as toy:
        for fields in ({}, {"n": 2}, {"parallel_tool_calls": False}, {"tool_choice": "none"}, {"tools": None}):
            asked = {"tools": [WEATHER], **fields}
            reply = (await toy.chat("Rome?", **asked)).json()
            conforms("CreateChatCompletionResponse", reply)
            assert bool(reply["choices"][0]["message"].get("tool_calls")) == (not {"tool_choice", "tools"} & set(fields))
            for chunk in await toy.stream("/v1/chat/completions", messages=MESSAGES, **asked):
                conforms("CreateChatCompletionStreamResponse", chunk)
