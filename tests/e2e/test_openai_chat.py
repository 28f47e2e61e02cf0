"""The official client's chat calls against the default model."""

import json
from importlib.util import find_spec

import httpx
import jsonschema
import openai
import pytest
from patience import until

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


def test_an_answer(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client, model):
    asked = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 3
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_system_prompt_reaches_the_template(client, model, server):
    messages = [{"role": "system", "content": "You are a pirate."}, *QUESTION]
    ids = httpx.post(f"{server.where}/tokenize", json={"messages": messages}).json()["tokens"]
    text = httpx.post(f"{server.where}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "<|im_start|>system\nYou are a pirate.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_second_turn_hits_the_prefix_cache(client, model):
    story = [{"role": "user", "content": "Tell me about rivers. " * 30}]
    first = client.chat.completions.create(model=model, messages=story, temperature=0, max_tokens=16)
    answer = first.choices[0].message.content
    more = [*story, {"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(model=model, messages=more, temperature=0, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens * 0.7


def test_logprobs(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content).startswith(reply.choices[0].message.content)
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy takes the likeliest
        assert bytes(entry.bytes).decode() == entry.token


def test_several_choices_differ(client, model):
    reply = client.chat.completions.create(model=model, messages=QUESTION, n=3, temperature=1.5, max_tokens=24, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in reply.choices}) > 1


def test_a_seed_repeats_its_answer(client, model):
    asked = {"model": model, "messages": QUESTION, "temperature": 1.0, "max_tokens": 16, "seed": 7}
    texts = {client.chat.completions.create(**asked).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_leaving_a_stream_frees_the_engine(client, model, server):
    stream = client.chat.completions.create(model=model, messages=QUESTION, stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()

    def idle():
        stats = httpx.get(f"{server.where}/stats").json()
        return stats["running"] == stats["pages_used"] == 0

    until(idle)


def test_errors_are_those_of_the_client(client, model):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 3000}])
    assert error.value.body["code"] == "context_length_exceeded"
    assert "2048" in error.value.body["message"]


def test_a_schema_is_kept(client, model, require):
    require("xgrammar", find_spec("xgrammar") is not None)
    people = {"type": "integer", "minimum": 0, "maximum": 999}  # without a least number, digits may go on for ever
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "people": people}}
    schema = {**city, "required": ["city", "people"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    reply = client.chat.completions.create(
        model=model, messages=QUESTION, n=4, temperature=1.5, seed=3, max_tokens=400, response_format=form
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_a_schema_that_is_none_is_refused(client, model, require):
    require("xgrammar", find_spec("xgrammar") is not None)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="cannot be followed: Invalid type"):
        client.chat.completions.create(model=model, messages=QUESTION, response_format=form)
