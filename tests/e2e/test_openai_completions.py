"""The official client's completions calls, with vLLM's extra fields, against the default model."""

import asyncio

import httpx
import openai
import pytest

PROMPT = "The three primary colors are"


def complete(client, model, prompt=PROMPT, extra=None, **fields):
    return client.completions.create(model=model, prompt=prompt, extra_body=extra or {}, **{"temperature": 0, "max_tokens": 12, **fields})


def test_greedy_text_is_the_same_in_every_shape(client, model, server):
    text = complete(client, model).choices[0].text
    ids = httpx.post(f"{server.where}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    both = complete(client, model, [PROMPT, PROMPT]).choices
    assert len(text) > 12
    assert complete(client, model, ids).choices[0].text == text
    assert [choice.text for choice in both] == [text, text]
    assert "".join(chunk.choices[0].text for chunk in complete(client, model, stream=True)) == text


def test_scoring_a_text_agrees_with_generating_it(client, model, server):
    made = complete(client, model, logprobs=1, extra={"return_token_ids": True})
    choice = made.choices[0]
    ids = choice.prompt_token_ids + choice.token_ids
    scored = complete(client, model, ids, echo=True, logprobs=1, max_tokens=0)
    tail = scored.choices[0].logprobs.token_logprobs[-len(choice.token_ids) :]
    assert tail == pytest.approx(choice.logprobs.token_logprobs, abs=0.08)
    assert scored.choices[0].text == PROMPT + choice.text
    assert scored.usage.completion_tokens == 0


def test_prompt_logprobs(client, model):
    reply = complete(client, model, extra={"prompt_logprobs": 2}, max_tokens=1)
    positions = reply.choices[0].prompt_logprobs
    assert positions[0] is None
    assert len(positions) == reply.usage.prompt_tokens
    assert all(2 <= len(position) <= 3 for position in positions[1:])


def test_stop_strings(client, model):
    text = complete(client, model, max_tokens=40).choices[0].text
    stop = text[10:13]
    cut = text[: text.index(stop)]
    choice = complete(client, model, max_tokens=40, stop=stop).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (cut, "stop", stop)
    kept = complete(client, model, max_tokens=40, stop=[stop], extra={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == cut + stop
    assert "".join(chunk.choices[0].text for chunk in complete(client, model, max_tokens=40, stop=stop, stream=True)) == cut


def test_stop_tokens_and_ignored_ends(client, model):
    ids = complete(client, model, extra={"return_token_ids": True}).choices[0].token_ids
    choice = complete(client, model, extra={"stop_token_ids": [ids[4]], "return_token_ids": True}).choices[0]
    assert choice.token_ids == ids[: ids.index(ids[4]) + 1]
    assert choice.stop_reason == ids[4]
    long = complete(client, model, max_tokens=150, extra={"ignore_eos": True})
    assert long.usage.completion_tokens == 150


def test_the_sampler_obeys(client, model):
    first = complete(client, model, max_tokens=1, extra={"return_token_ids": True}).choices[0].token_ids[0]
    barred = complete(client, model, max_tokens=1, extra={"return_token_ids": True}, logit_bias={str(first): -100}).choices[0]
    assert barred.token_ids[0] != first
    forced = complete(client, model, max_tokens=3, extra={"return_token_ids": True, "allowed_token_ids": [500, 600]}).choices[0]
    assert set(forced.token_ids) <= {500, 600}
    text = complete(client, model, max_tokens=20).choices[0].text
    word = max(text.split(), key=len).strip(".,:;\"'")
    without = complete(client, model, max_tokens=20, extra={"bad_words": [word]}).choices[0].text
    assert word not in without.split()
    minimum = complete(client, model, max_tokens=60, temperature=1.0, seed=3, extra={"min_tokens": 60}).usage
    assert minimum.completion_tokens == 60


def test_best_of_and_beams(client, model):
    best = complete(client, model, best_of=3, n=1, temperature=1.0, seed=5)
    assert len(best.choices) == 1
    beams = complete(client, model, n=2, max_tokens=8, extra={"use_beam_search": True}).choices
    assert len({choice.text for choice in beams}) == 2
    assert {choice.finish_reason for choice in beams} <= {"stop", "length"}


@pytest.mark.heavy
def test_many_at_once_each_get_their_own_answer(server, model):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.where}/v1", api_key="none", max_retries=0, timeout=120) as client:
            prompts = [f"Count: {k}, {k + 1}," for k in range(16)]
            replies = [client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=10, echo=True) for prompt in prompts]
            return [reply.choices[0].text for reply in await asyncio.gather(*replies)]

    texts = asyncio.run(ask())
    assert all(text.startswith(f"Count: {k}, {k + 1},") for k, text in enumerate(texts))
    assert len(set(texts)) == 16


def test_a_bad_request_does_not_disturb_a_running_stream(client, model, server):
    stream = complete(client, model, max_tokens=60, extra={"ignore_eos": True}, stream=True)
    alone = complete(client, model, max_tokens=60, extra={"ignore_eos": True}).choices[0].text
    text = next(iter(stream)).choices[0].text
    for body in (b"{", b'{"prompt": "\xff"}', b'{"prompt": [99999999]}', b'{"prompt": "x", "n": 100000}'):
        response = httpx.post(f"{server.where}/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone
