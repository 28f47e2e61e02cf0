"""Structured outputs in the engine: rows follow a toy grammar, whatever the overlap, pages and ranks."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.messages import EngineRequest, FinishReason, error_of
from pagoda.serving.engine.structured import StructuredOutputsParams
from patience import LIMIT_S
from slow_steps import HandBrake, side_by_side, slow_engine
from toy import ToyModel, ask, dense_greedy, toy_engine, toy_request


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

    def failure(self) -> str | None:
        return None

    def forced(self) -> list[int]:
        return [self._next - self._step * place for place in range(6)]

    def fill(self, row: Any) -> None:
        row.view(np.uint32)[self._next // 32] = 1 << self._next % 32


def compile_toy(structured: StructuredOutputsParams) -> Any:
    if structured.kind != "grammar":
        raise RequestError("no countdown", param="response_format")
    return partial(Countdown, *map(int, str(structured.grammar).split()))


def engine(sink: Sink, **options: Any) -> Engine:
    made = toy_engine(sink, **options)
    made.core.follow_grammars(compile_toy)
    return made


def counting(name: str, prompt: list[int], start: int, step: int, count: int, n: int = 1) -> EngineRequest:
    request = toy_request(name, prompt, count)
    return replace(
        request, params=replace(request.params, structured_outputs=StructuredOutputsParams(grammar=f"{start} {step}"), ignore_eos=True, n=n)
    )


@pytest.mark.parametrize(
    "options", [{"overlap": 1}, {"overlap": 3}, {"num_pages": 60, "budget": 16}, {"world": 2}], ids=["1", "3", "few pages", "ranks"]
)
async def test_rows_follow_their_grammars_and_others_are_left_alone(options: dict[str, Any]) -> None:
    brake = HandBrake()
    client = await InProcessClient.start(partial(slow_engine, partial(engine, **options), brake))
    prompts = [[i + 2, *range(3, 20)] for i in range(8)]
    free = [ask(client, toy_request(f"f{i}", prompt, 24)) for i, prompt in enumerate(prompts)]
    bound = [ask(client, counting(f"b{i}", prompt, 90 - i, 1 + i % 3, 24, n=2), n=2) for i, prompt in enumerate(prompts)]
    answers = await side_by_side(client, brake, *free, *bound)
    stats = await client.stats()
    await client.close()
    assert answers[:8] == [[dense_greedy(ToyModel(), prompt, 24)] for prompt in prompts]
    assert answers[8:] == [[[90 - i - k * (1 + i % 3) for k in range(24)]] * 2 for i in range(8)]
    assert bool(stats.preemptions) == ("num_pages" in options) and stats.jumped_tokens > 0


async def test_forced_tokens_take_no_steps_where_that_is_worth_a_step_that_is_not_captured() -> None:
    counted = []
    for others in (0, 12):
        brake = HandBrake()
        client = await InProcessClient.start(partial(slow_engine, engine, brake))
        free = [ask(client, toy_request(f"f{i}", [i + 2, 3, 4], 60)) for i in range(others)]
        answers = asyncio.gather(ask(client, counting("b", [5, 6, 7], 90, 1, 30)), *free)
        while (await client.stats()).running <= others:  # all before the first of them ends
            await asyncio.sleep(0.01)
        brake.release()
        (answer,), *_ = await answers
        assert answer == [90 - k for k in range(30)]
        counted.append(await client.stats())
        await client.close()
    assert counted[0].jumped_tokens == 24 and counted[0].steps < 8
    assert counted[1].jumped_tokens == 0


async def test_what_cannot_be_compiled_is_rejected_and_leaves_nothing() -> None:
    client = await InProcessClient.start(engine)
    request = toy_request("x", [2, 3], 4)
    with pytest.raises(RequestError, match="no countdown"):
        await ask(client, replace(request, params=replace(request.params, structured_outputs=StructuredOutputsParams(regex="else"))))
    with pytest.raises(RequestError, match="beam search cannot follow a grammar"):
        await ask(client, replace(counting("y", [2, 3], 9, 1, 4), beam_width=2))
    stats = await client.stats()
    await client.close()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_a_request_may_be_aborted_while_its_grammar_is_compiled() -> None:
    begun, gate = threading.Event(), threading.Event()

    def slowly(structured: StructuredOutputsParams) -> Any:
        begun.set()
        assert gate.wait(LIMIT_S)
        return compile_toy(structured)

    def made(sink: Sink) -> Engine:
        engine = toy_engine(sink)
        engine.core.follow_grammars(slowly)
        return engine

    client = await InProcessClient.start(made)
    try:
        waiting = asyncio.ensure_future(ask(client, counting("a", [2, 3], 9, 1, 4)))
        left = asyncio.ensure_future(ask(client, counting("b", [2, 3], 9, 1, 4)))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        await client.abort(["a"])
        left.cancel()
        assert await waiting == [[]]
        free = await ask(client, toy_request("c", [2, 3], 4))
        gate.set()
        assert len(free[0]) == 4 and await ask(client, counting("d", [2, 3], 9, 1, 4)) == [[9, 8, 7, 6]]
        stats = await client.stats()
    finally:
        gate.set()
        await client.close()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


class Weary(Countdown):
    """Gives up after two tokens."""

    left = 2

    def accept(self, tokens: list[int]) -> None:
        self.left -= len(tokens)
        super().accept(tokens if self.left >= 0 else [])

    def forced(self) -> list[int]:
        return []

    def fill(self, row: Any) -> None:
        super().fill(row)
        if self.left <= 0:
            row[:] = 0
            row.view(np.uint32)[0] = 2  # the end token

    def failure(self) -> str | None:
        return "too much work" if self.left <= 0 else None


@pytest.mark.parametrize("n", [1, 3])
async def test_a_grammar_that_gives_up_fails_its_request_and_no_other(n: int) -> None:
    def made(sink: Sink) -> Engine:
        engine = toy_engine(sink)
        engine.core.follow_grammars(
            lambda asked: partial(Weary if asked.grammar == "90 1" else Countdown, *map(int, str(asked.grammar).split()))
        )
        return engine

    client = await InProcessClient.start(made)
    weary = counting("w", [2, 3], 90, 1, 9, n)
    weary = replace(weary, params=replace(weary.params, ignore_eos=False), eos_ids=(1,))
    other = asyncio.ensure_future(ask(client, counting("o", [2, 3, 4], 80, 2, 9)))
    last = None
    async for delta in client.generate(weary):
        last = delta
        if any(part.finish_reason is FinishReason.ERROR for part in delta.sequences):
            break
    assert last is not None and last.refused and last.error == "too much work"
    assert isinstance(error_of(last), RequestError)
    assert await other == [[80 - 2 * k for k in range(9)]]
    await client.abort(["w"])
    stats = await client.stats()
    await client.close()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)


async def test_an_engine_without_a_compiler_says_so() -> None:
    client = await InProcessClient.start(toy_engine)
    with pytest.raises(RequestError, match="no compiler of grammars"):
        await ask(client, counting("x", [2, 3], 9, 1, 4))
    await client.close()
