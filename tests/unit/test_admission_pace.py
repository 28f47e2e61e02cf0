"""Requests that come at once, by a simulated clock: a step begins when they fill it or after a moment, the others are let in behind it,
and whatever comes when, everybody gets the tokens that they would get alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.serving.engine.core import EAGER_S
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts
from scheduler_toy import expected_tokens, toy_facts
from timed_loop import TimedLoop

BUDGET, PROMPT, COUNT = 96, 24, 64
FULL = BUDGET // PROMPT
CONFIG = {"max_num_seqs": COUNT, "max_num_batched_tokens": BUDGET}
TOKEN_MS = 0.25
"""A full step of prompts takes 24 ms."""


def facts(**given: object) -> RunnerFacts:
    return replace(toy_facts(num_pages=4000, max_model_len=200), **given)  # type: ignore[arg-type]


def prompt_of(number: int, length: int = PROMPT) -> list[int]:
    return [(number * 7 + place * (1 + number % 5)) % 50 for place in range(length)]


def crowd(admit_ms: float, monkeypatch: pytest.MonkeyPatch, count: int = COUNT, **given: object) -> TimedLoop:
    loop = TimedLoop(facts(**given), (1.0, 0.01, TOKEN_MS), 0.2, admit_ms=admit_ms, **CONFIG).clock(monkeypatch)
    for number in range(count):
        loop.ask(str(number), prompt_of(number), 3)
    loop.run()
    assert len(loop.came) == count
    return loop


@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("admit_ms", [0.0, 0.05, 0.4])
def test_the_first_step_begins_as_soon_as_it_is_full(admit_ms: float, overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = crowd(admit_ms, monkeypatch, overlap=overlap)
    assert loop.plans[0].num_tokens == BUDGET
    assert loop.submitted[0] == pytest.approx((FULL * admit_ms + loop.host_ms) / 1000)


@pytest.mark.parametrize("overlap", [2, 3])
@pytest.mark.parametrize("admit_ms", [0.0, 0.05, 0.4])
def test_steps_of_prompts_are_full_and_the_ranks_never_wait(admit_ms: float, overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = crowd(admit_ms, monkeypatch, overlap=overlap)
    prompts = [place for place, plan in enumerate(loop.plans) if plan.num_tokens > plan.num_rows]
    assert all(loop.plans[place].num_tokens == BUDGET for place in prompts[:-2])
    assert sum(max(0.0, loop.began[place] - loop.ends[place - 1]) for place in prompts[1:]) == pytest.approx(0.0)


@pytest.mark.parametrize("admit_ms", [0.3, 0.9])
def test_ranks_with_nothing_to_do_wait_no_longer_than_a_moment(admit_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(facts(), (1.0, 0.0, 0.01), 0.0, admit_ms=admit_ms, **CONFIG).clock(monkeypatch)
    for number in range(40):
        loop.ask(str(number), prompt_of(number, 2), 2)
    loop.run()
    assert EAGER_S <= loop.submitted[0] <= EAGER_S + admit_ms / 1000 + 1e-9
    assert loop.plans[0].num_rows < 40 and len(loop.came) == 40


def test_slots_fill_a_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(facts(), (1.0, 0.0, 0.01), 0.0, admit_ms=0.1, **{**CONFIG, "max_num_seqs": 5}).clock(monkeypatch)
    for number in range(40):
        loop.ask(str(number), prompt_of(number, 2), 2)
    loop.run()
    assert loop.plans[0].num_rows == 5 and loop.submitted[0] == pytest.approx(0.0005) and len(loop.came) == 40


def test_a_step_that_has_ended_is_committed_before_all_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(facts(), (1.0, 0.0, 0.01), 0.0, admit_ms=0.5, **CONFIG).clock(monkeypatch)
    loop.ask("first", prompt_of(0), 3)
    loop.run({0.0001: ("second", prompt_of(1), 3)}, until=0.0002)
    for number in range(200):
        loop.ask(str(number), prompt_of(number, 2), 1)
    loop.run()
    assert loop.came["first"][0] < 0.01, "letting in two hundred takes 100 ms"


def test_one_who_comes_alone_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(facts(), (1.0, 0.0, 0.01), 0.0, **CONFIG).clock(monkeypatch)
    loop.ask("a", prompt_of(1), 2)
    loop.run()
    assert loop.submitted[0] == 0.0


Come = tuple[float, int, int]
"""When, how long a prompt, how many tokens of answer."""
come = st.tuples(st.floats(0, 0.2), st.integers(1, 60), st.integers(1, 12))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(come, min_size=1, max_size=30),
    st.sampled_from([0.0, 0.05, 0.7, 3.0]),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 3),
    st.integers(2, 40),
    st.booleans(),
)
def test_whoever_comes_when_gets_the_tokens_of_one_alone(
    crowd: list[Come], admit_ms: float, host_ms: float, overlap: int, slots: int, in_calls: bool
) -> None:
    made = facts(overlap=overlap, in_calls=in_calls)
    config = {**CONFIG, "max_num_seqs": slots}
    with pytest.MonkeyPatch.context() as patch:
        loop = TimedLoop(made, (2.0, 0.1, 0.05), host_ms, 0.2, admit_ms, **config).clock(patch)
        tokens = collect(loop)
        due = {when + 1e-6 * number: (str(number), prompt_of(number, length), most) for number, (when, length, most) in enumerate(crowd)}
        loop.run(due)
    for name, prompt, most in due.values():
        asked = EngineRequest(name, tuple(prompt), SamplingParams(temperature=0.0, seed=1, max_tokens=most, ignore_eos=True))
        assert tokens[name] == expected_tokens(asked, made.max_model_len)[0]
    assert loop.core._scheduler.stats().pages_used == 0 and not loop.core._scheduler.has_work


def collect(loop: TimedLoop) -> dict[str, list[int]]:
    """Tokens of each request, as they come."""
    tokens: dict[str, list[int]] = {}
    before = loop.deltas

    def deltas(told) -> None:
        before(told)
        for delta in told:
            tokens.setdefault(delta.request_id, []).extend(token for part in delta.sequences for token in part.token_ids)

    loop.deltas = deltas  # type: ignore[method-assign]
    return tokens
