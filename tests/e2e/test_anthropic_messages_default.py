"""The official Anthropic client against the default model."""

import anthropic
import httpx
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
pytestmark = pytest.mark.heavy


@pytest.fixture
def messages(server):
    with anthropic.Anthropic(base_url=server.where, api_key="none", max_retries=0, timeout=120) as made:
        yield made.messages


def test_a_message_its_stream_and_its_length(messages, server):
    model = httpx.get(f"{server.where}/v1/models").json()["data"][0]["id"]
    asked = {"model": model, "messages": QUESTION, "system": "You are a geographer."}
    exact = {"max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = messages.create(**asked, **exact)
    with messages.stream(**asked, **exact) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    (block,) = whole.content
    assert "Paris" in block.text and whole.stop_reason == "end_turn"
    assert "".join(pieces) == block.text == streamed.content[0].text and len(pieces) > 3
    counted = messages.count_tokens(**asked).input_tokens
    for reply in (whole, streamed):
        assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == counted
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        messages.create(**{**asked, "model": "nobody"}, max_tokens=1)
    dice = {"max_tokens": 16, "extra_body": {"temperature": 1.5, "seed": 5}}
    with messages.stream(**asked, **dice) as stream:
        assert stream.get_final_message().content[0].text == messages.create(**asked, **dice).content[0].text
