"""Budgets of thoughts in the engine: rows go free until theirs is spent, then close their thoughts and go free again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pagoda.serving.engine import bursts
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.spec.drafter import PromptLookup
from pagoda.serving.engine.structured import StructuredOutputsParams, Thinking
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.choose import choose
from pagoda.serving.frontend.structured.answers import bounded, budgeted
from pagoda.serving.frontend.structured.reasoning import AfterThinking, Anything
from pagoda.serving.frontend.structured.vocabulary import Vocabulary
from slow_steps import HandBrake, side_by_side, slow_engine
from toy import ToyModel, ask, dense_greedy, toy_engine, toy_request

WORDS = [chr(0x4E00 + token) for token in range(97)]
CLOSE = [91, 92, 93]
"""A mark of three tokens that the toy's greedy answers below do not hold."""


def encode(text: str, **_: Any) -> list[int]:
    return [ord(char) - 0x4E00 for char in text]


VOCABULARY = Vocabulary(SimpleNamespace(encode=encode), [word.encode() for word in WORDS], [], [])  # type: ignore[arg-type]
MARK = "".join(WORDS[token] for token in CLOSE)


def compile_budget(asked: StructuredOutputsParams) -> Any:
    assert asked.thinking is not None and asked.free
    return partial(AfterThinking, Anything, asked.thinking, VOCABULARY)


def engine(sink: Sink, **options: Any) -> Engine:
    made = toy_engine(sink, **options)
    made.core.follow_grammars(compile_budget)
    return made


def asking(name: str, prompt: list[int], budget: int, count: int, n: int = 1) -> EngineRequest:
    structured = StructuredOutputsParams(free=True, thinking=Thinking((WORDS[90],), (MARK,), True, budget))
    request = toy_request(name, prompt, count)
    return replace(request, params=replace(request.params, structured_outputs=structured, n=n))


def expected(prompt: list[int], budget: int, count: int) -> list[int]:
    """The oracle's: its own tokens, the mark in their midst, and what it says after that."""
    model = ToyModel()
    thought = dense_greedy(model, prompt, budget)
    assert not set(thought) & set(CLOSE)
    tokens = [*thought, *CLOSE]
    return [*tokens, *dense_greedy(model, [*prompt, *tokens], count - len(tokens))]


OPTIONS: dict[str, dict[str, Any]] = {
    "overlap 1": {"overlap": 1},
    "overlap 3": {"overlap": 3},
    "few pages": {"num_pages": 60, "budget": 16},
    "ranks": {"world": 2},
    "drafts": {"drafter": PromptLookup(3), "budget": 256},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.heavy) if name == "ranks" else name for name in OPTIONS])
async def test_thoughts_close_when_their_budget_is_spent(name: str) -> None:
    client = await InProcessClient.start(partial(slow_engine, partial(engine, **OPTIONS[name]), brake := HandBrake()))
    prompts = [[i + 2, *range(3, 20)] for i in range(8)]
    free = [ask(client, toy_request(f"f{i}", prompt, 24)) for i, prompt in enumerate(prompts)]
    bound = [ask(client, asking(f"b{i}", prompt, 2 * i, 24, n=2), n=2) for i, prompt in enumerate(prompts)]
    answers = await side_by_side(client, brake, *free, *bound)
    stats = await client.stats()
    await client.close()
    assert answers[:8] == [[dense_greedy(ToyModel(), prompt, 24)] for prompt in prompts]
    assert answers[8:] == [[expected(prompt, 2 * i, 24)] * 2 for i, prompt in enumerate(prompts)]
    assert bool(stats.preemptions) == (name == "few pages")


async def test_a_row_is_bound_only_while_its_mark_is_due() -> None:
    """As long as its budget lasts, and once its thoughts are closed, it shares the way of all others."""
    seen: list[tuple[int, bool, bool]] = []
    client = await InProcessClient.start(engine)
    scheduler = client._engine.core._scheduler  # type: ignore[attr-defined]
    slots, plan = scheduler._ledger.slots, scheduler.plan

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = plan(*args, **kwargs)
        if made is not None and made.sampled.any():
            seen.append((int(made.draws[0]), bool(slots.follows[made.slots[0]]), made.masks is not None))
        return made

    scheduler.plan = watched
    [answer] = await ask(client, asking("a", [2, *range(3, 20)], 8, 20))
    await client.close()
    assert answer == expected([2, *range(3, 20)], 8, 20)
    masked = [draw for draw, _, masked in seen if masked]
    assert masked and min(masked) == 8 and max(masked) <= 9 + len(CLOSE)
    assert not any(follows for draw, follows, _ in seen if draw < 8 or draw > 9 + len(CLOSE))


@pytest.mark.parametrize("overlap", [1, 2])
async def test_bursts_stop_where_a_mark_is_due(overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "BURST_MS", 1e9)
    client = await InProcessClient.start(partial(engine, burst=4, overlap=overlap))
    runs, plan = [], (scheduler := client._engine.core._scheduler).plan  # type: ignore[attr-defined]

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = plan(*args, **kwargs)
        runs.extend([] if made is None or made.runs is None else made.runs.tolist())
        return made

    scheduler.plan = watched
    prompts = [[i + 2, *range(3, 20)] for i in range(3)]
    asked = [asking("a", prompts[0], 6, 30), asking("b", prompts[1], 11, 30), toy_request("c", prompts[2], 30)]
    answers = await asyncio.gather(*(ask(client, request) for request in asked))
    await client.close()
    assert answers == [[expected(prompts[0], 6, 30)], [expected(prompts[1], 11, 30)], [dense_greedy(ToyModel(), prompts[2], 30)]]
    assert max(runs, default=0) == 4


async def test_thoughts_that_end_by_themselves_are_left_alone() -> None:
    """The mark comes early: with a small vocabulary of marks, by the model's own choice."""
    prompt = [7, 3, 4, 5, 6]
    own = dense_greedy(ToyModel(), prompt, 24)
    mark = "".join(WORDS[token] for token in own[4:6])
    thinking = Thinking((WORDS[90],), (mark,), True, 12)
    request = toy_request("a", prompt, 24)
    structured = StructuredOutputsParams(free=True, thinking=thinking)
    client = await InProcessClient.start(engine)
    answers = await asyncio.gather(
        ask(client, replace(request, params=replace(request.params, structured_outputs=structured))),
        ask(client, toy_request("b", prompt, 24)),
    )
    await client.close()
    assert answers == [[own], [own]]


def states(thinking: Thinking, inner: Any = Anything) -> AfterThinking:
    return AfterThinking(inner, thinking, VOCABULARY)


def allowed(matcher: AfterThinking) -> list[int]:
    row = np.zeros(4, np.int32)
    matcher.fill(row)
    return [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))][:97]


def test_what_is_written_of_the_mark_is_not_written_again() -> None:
    for written in range(len(CLOSE)):
        matcher = states(Thinking((), (MARK,), True, 4))
        matcher.accept([1, 2, 3, 4][: 4 - written] + CLOSE[:written])
        assert matcher.forced() == CLOSE[written:]
        for token in CLOSE[written:]:
            assert allowed(matcher) == [token] and not matcher.idle()
            matcher.accept([token])
        assert matcher.idle() and matcher.forced() == [] and len(allowed(matcher)) == 97


def test_the_mark_that_closes_is_the_one_that_belongs_to_the_opened() -> None:
    opens, closes = (WORDS[1], WORDS[2]), (WORDS[11], WORDS[12])
    for opened in (0, 1):
        matcher = states(Thinking(opens, closes, True, 1, opened=opened))
        matcher.accept([5])
        assert allowed(matcher) == [11 + opened]
        chosen = states(Thinking(opens, closes, False, 1))
        chosen.accept([1 + opened, 5])
        assert allowed(chosen) == [11 + opened]


def test_thoughts_that_begin_with_several_tokens() -> None:
    opens = (WORDS[1] + WORDS[2] + WORDS[3],)
    matcher = states(Thinking(opens, (MARK,), False, 2))
    for token in (1, 2, 3, 50, 51):
        assert len(allowed(matcher)) == 97 and not matcher.idle()
        matcher.accept([token])
    assert allowed(matcher) == CLOSE[:1]
    other = states(Thinking(opens, (MARK,), False, 2))
    other.accept([1, 2, 4, 50, 51, 52])
    assert other.idle()


def test_thoughts_that_begin_again_spend_on() -> None:
    thinking = Thinking((WORDS[1], WORDS[8] + WORDS[1]), (WORDS[11],), False, 3, repeats=True)
    matcher = states(thinking)
    matcher.accept([1, 50, 11, 8, 1])
    assert len(allowed(matcher)) == 97
    matcher.accept([51])
    assert allowed(matcher) == [11]
    assert matcher.advance(11) and not matcher.idle() and matcher.advance(8)
    assert matcher.advance(1) and allowed(matcher) == [11]
    for _ in range(3):
        matcher.go_back()
    assert allowed(matcher) == [11]
    matcher.accept([11, 9])
    assert matcher.idle()


@pytest.mark.parametrize("name", ["gpt_oss", "muse_glimmer", "inkling"])
def test_families_whose_thoughts_are_part_of_their_form(name: str) -> None:
    answers = AnswerFormat(reasoning=choose("reasoning", name, ""))
    made = budgeted(None, 5, answers, "<|start|>assistant", "x")
    assert made is not None and made.free and made.thinking is not None and made.thinking.repeats and not made.thinking.begun
    bound = StructuredOutputsParams(regex="a")
    assert bounded(answers, None) and not bounded(answers, bound)
    assert not bounded(AnswerFormat(), None) and bounded(AnswerFormat(reasoning=choose("reasoning", "qwen3", "")), bound)


def test_the_prompt_says_which_mark_has_opened_the_thoughts() -> None:
    answers = AnswerFormat(reasoning=choose("reasoning", "k2_horizon", ""))
    made = budgeted(None, 5, answers, "<assistant><ifm|think_fast>\n", "x")
    assert made is not None and made.thinking is not None and (made.thinking.begun, made.thinking.opened) == (True, 1)
    assert budgeted(None, 5, answers, "<ifm|think_fast>\n</ifm|think_fast>\n\n", "x") is None


@pytest.mark.parametrize("budget", [2**31 - 1, 2**31 - 20])
async def test_a_budget_beyond_any_answer_binds_nothing_and_ends_nobody(budget: int) -> None:
    prompt = [2, *range(3, 20)]
    client = await InProcessClient.start(engine)
    try:
        assert await ask(client, asking("a", prompt, budget, 24)) == [dense_greedy(ToyModel(), prompt, 24)]
        assert await ask(client, toy_request("b", prompt, 4)) == [dense_greedy(ToyModel(), prompt, 4)]
    finally:
        await client.close()
