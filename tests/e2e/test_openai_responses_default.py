"""The official client's Responses calls against the default model."""

import json
import time
from importlib.util import find_spec

import pytest

QUESTION = "What is the capital of France? Answer in one short sentence."
pytestmark = pytest.mark.heavy


def test_a_response_its_stream_and_the_next_turn(client, model):
    asked = {"model": model, "input": QUESTION, "max_output_tokens": 24}
    whole = client.responses.create(**asked, temperature=0)
    with client.responses.stream(**asked, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert "Paris" in whole.output_text and whole.status == "completed"
    assert "".join(pieces) == streamed.output_text == whole.output_text and len(pieces) > 3
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    following = client.responses.create(model=model, input="And of Italy?", previous_response_id=whole.id, max_output_tokens=24)
    assert following.usage.input_tokens > whole.usage.total_tokens
    dice = {"temperature": 1.5, "extra_body": {"seed": 5}}
    with client.responses.create(**asked, **dice, stream=True) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == client.responses.create(**asked, **dice).output_text


def test_the_background(client, model):
    begun = client.responses.create(model=model, input=QUESTION, max_output_tokens=1000, background=True, extra_body={"ignore_eos": True})
    while client.responses.retrieve(begun.id).status == "queued":
        time.sleep(0.02)
    assert client.responses.cancel(begun.id).status == "cancelled"


def test_a_schema_is_kept(client, model, require):
    require("xgrammar", find_spec("xgrammar") is not None)
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    form = {"type": "json_schema", "name": "city", "schema": schema | {"additionalProperties": False}}
    reply = client.responses.create(model=model, input=QUESTION, text={"format": form}, max_output_tokens=200)
    assert list(json.loads(reply.output_text)) == ["city"]
