"""Structured outputs: masks in the engine against a toy grammar, xgrammar's masks against a validator, and the request field."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from frontend_samples import byte_level
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.frontend.load import load_tokenizer
from pagoda.serving.frontend.structured import GrammarMaker
from toy import ToyModel, dense_greedy, toy_engine, toy_request
from toy_server import toy_server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


class Countdown:
    """A grammar of one sentence: each token is the one before it minus `step`, beginning with `start`."""

    def __init__(self, start: int, step: int) -> None:
        self._next, self._step = start, step

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            assert token == self._next
            self._next -= self._step

    def advance(self, token: int) -> bool:
        fits = token == self._next
        self._next -= self._step * fits
        return fits

    def go_back(self) -> None:
        self._next += self._step

    def fill(self, row: Any) -> None:
        row.view(np.uint32)[self._next // 32] = 1 << self._next % 32


def compile_toy(structured: tuple[str, Any]) -> Any:
    if structured[0] != "countdown":
        raise RequestError("no countdown", param="response_format")
    return partial(Countdown, *structured[1])


def engine(sink: Sink, **options: Any) -> Engine:
    made = toy_engine(sink, **options)
    made.core.follow_grammars(compile_toy)
    return made


async def ask(client: InProcessClient, request: EngineRequest, n: int = 1) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in range(n)]
    async for delta in client.generate(request):
        for part in delta.sequences:
            out[part.index] += part.token_ids
    return out


def counting(name: str, prompt: list[int], start: int, step: int, count: int, n: int = 1) -> EngineRequest:
    request = toy_request(name, prompt, count)
    return replace(request, params=replace(request.params, structured=("countdown", (start, step)), ignore_eos=True, n=n))


@pytest.mark.parametrize(
    "options", [{"overlap": 1}, {"overlap": 3}, {"num_pages": 60, "budget": 16}, {"world": 2}], ids=["1", "3", "few pages", "ranks"]
)
async def test_rows_follow_their_grammars_and_others_are_left_alone(options: dict[str, Any]) -> None:
    client = await InProcessClient.start(partial(engine, **options))
    prompts = [[i + 2, *range(3, 20)] for i in range(8)]
    free = [ask(client, toy_request(f"f{i}", prompt, 24)) for i, prompt in enumerate(prompts)]
    bound = [ask(client, counting(f"b{i}", prompt, 90 - i, 1 + i % 3, 24, n=2), n=2) for i, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*free, *bound)
    preemptions = (await client.stats()).preemptions
    await client.close()
    assert answers[:8] == [[dense_greedy(ToyModel(), prompt, 24)] for prompt in prompts]
    assert answers[8:] == [[[90 - i - k * (1 + i % 3) for k in range(24)]] * 2 for i in range(8)]
    assert bool(preemptions) == ("num_pages" in options)


async def test_what_cannot_be_compiled_is_rejected_and_leaves_nothing() -> None:
    client = await InProcessClient.start(engine)
    request = toy_request("x", [2, 3], 4)
    with pytest.raises(RequestError, match="no countdown"):
        await ask(client, replace(request, params=replace(request.params, structured=("else", ""))))
    with pytest.raises(RequestError, match="beam search cannot follow a grammar"):
        await ask(client, replace(counting("y", [2, 3], 9, 1, 4), beam_width=2))
    stats = await client.stats()
    await client.close()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_an_engine_without_a_compiler_says_so() -> None:
    client = await InProcessClient.start(toy_engine)
    with pytest.raises(RequestError, match="no compiler of grammars"):
        await ask(client, counting("x", [2, 3], 9, 1, 4))
    await client.close()


@pytest.mark.parametrize("seed", range(25))
def test_whatever_the_masks_allow_is_the_schemas(seed: int, tmp_path: Path, require: Any) -> None:
    require("xgrammar", find_spec("xgrammar") is not None)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(tmp_path)
    vocab = tokenizer.vocab_size + 40  # models have more rows than the tokenizer has words
    make = GrammarMaker(EngineConfig(tokenizer=str(tmp_path)), vocab)
    matcher, tokens, chosen = make(("json_schema", json.dumps(SCHEMA)))(), list[int](), random.Random(seed)
    while not tokens or tokens[-1] not in tokenizer.eos_ids:
        mask = np.zeros((vocab + 31) // 32, np.int32)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab]).tolist()
        assert not (set(allowed) & tokenizer.special_ids) - set(tokenizer.eos_ids)
        words = [token for token in allowed if tokenizer.token_bytes(token).strip()]
        tokens.append(chosen.choice(words))
        matcher.accept(tokens[-1:])
    text = tokenizer.decode(tokens)
    jsonschema.validate(json.loads(text), SCHEMA)
    mask = np.zeros((vocab + 31) // 32, np.int32)
    matcher.fill(mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == list(tokenizer.eos_ids)


async def test_the_field_reaches_the_engine(require: Any) -> None:
    require("xgrammar", find_spec("xgrammar") is not None)
    async with toy_server() as toy:
        for form in (FORMAT, {"type": "json_object"}, {"type": "text"}):
            assert (await toy.chat("x", response_format=form)).status_code == 200
        assert (await toy.complete("x", response_format=FORMAT)).status_code == 200
        asked = [request.params.structured for request in toy.engine.requests]
        both = await toy.chat("x", response_format=FORMAT, tools=[{"type": "function", "function": {"name": "f"}}])
    assert asked == [("json_schema", json.dumps(SCHEMA)), ("json_object", ""), None, ("json_schema", json.dumps(SCHEMA))]
    assert (both.status_code, both.json()["error"]["param"]) == (400, "response_format")


async def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.serving.api.openai.structured.installed", lambda: False)
    async with toy_server() as toy:
        reply = await toy.chat("x", response_format=FORMAT)
    assert reply.status_code == 400
    assert "pagoda-llm[structured]" in reply.json()["error"]["message"]
