"""Bursts: when the scheduler plans several steps at once, what becomes of rows that end in one, and that no client can tell."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest
from pagoda.serving.engine import bursts
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest, EngineStats, FinishReason
from scheduler_toy import Toy, expected_tokens, group, toy_facts
from toy import toy_engine, toy_request

PROMPTS = [[5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 8, 25], [90, 4, 6, 31], [7] * 30, [11, 12], list(range(2, 60))]


def runs_of(toy: Toy) -> list[list[int]]:
    return [[] if plan.runs is None else plan.runs.tolist() for plan in toy.plans]


def test_rows_get_a_burst_up_to_their_limits() -> None:
    toy = Toy(toy_facts(burst=4, overlap=1))
    toy.submit("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    toy.submit("b", [4, 5], max_tokens=8, ignore_eos=True)
    toy.drain()
    assert runs_of(toy) == [[], [4, 4], [4, 3], [3]]
    assert toy.scheduler.stats().steps == 1 + 4 + 4 + 3
    toy.check_tokens("a")
    toy.check_tokens("b")


def test_a_row_that_ends_within_a_burst_keeps_nothing_behind_its_end() -> None:
    plain = Toy()
    plain.submit("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    stop = expected_tokens(plain.requests["a"], 64)[0][2]
    for overlap in (1, 2, 3):
        toy = Toy(toy_facts(burst=4, overlap=overlap))
        toy.submit("a", [1, 2, 3], max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
        toy.submit("b", [4, 5], max_tokens=12, ignore_eos=True)
        toy.drain()
        assert [4, 4] in runs_of(toy) and toy.reasons["a"][0] is FinishReason.STOP
        toy.check_tokens("a")
        toy.check_tokens("b")
        assert toy.scheduler.stats().generation_tokens == sum(len(tokens[0]) for tokens in toy.tokens.values())


@pytest.mark.parametrize(
    "params",
    [{"logprobs": 1}, {"min_tokens": 2}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"bad_words_token_ids": ((49, 48),)}],
)
def test_rows_that_the_host_or_the_sampler_looks_at_take_single_steps(params: dict[str, object]) -> None:
    toy = Toy(toy_facts(burst=4))
    toy.submit("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    toy.submit("b", [4, 5], max_tokens=12, ignore_eos=True, **params)
    toy.drain()
    assert not any(plan.runs is not None for plan in toy.plans if plan.num_rows == 2)


def test_nobody_waits_for_a_burst() -> None:
    toy = Toy(toy_facts(burst=4, overlap=1), max_num_seqs=1)
    toy.submit("a", [1, 2, 3], max_tokens=8, ignore_eos=True)
    toy.submit("b", [4, 5], max_tokens=6, ignore_eos=True)
    toy.drain()
    assert runs_of(toy) == [[]] * 9 + [[4], []]


def test_slow_steps_come_one_by_one() -> None:
    toy = Toy(toy_facts(burst=4, overlap=1))
    toy.submit("a", [1, 2, 3], max_tokens=10, ignore_eos=True)
    toy.step()
    toy.scheduler.note_pace(toy.plans[0], bursts.BURST_MS / 2 - 0.01)
    toy.step()
    toy.scheduler.note_pace(toy.plans[0], bursts.BURST_MS)
    toy.drain()
    assert runs_of(toy) == [[], [2]] + [[]] * 7


def test_pages_that_a_burst_would_lack_make_it_a_step() -> None:
    toy = Toy(toy_facts([group(2)], num_pages=8, burst=4, overlap=1), enable_prefix_caching=False)
    toy.submit("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    toy.submit("b", [4, 5], max_tokens=9, ignore_eos=True)
    toy.drain()
    assert runs_of(toy) == [[], [4, 4], *[[]] * 5, [3]] and toy.scheduler.stats().preemptions == 1
    toy.check_tokens("a")
    toy.check_tokens("b")


async def _answers(burst: int, overlap: int) -> tuple[list[list[tuple[list[int], object]]], EngineStats, list[int]]:
    client = await InProcessClient.start(partial(toy_engine, burst=burst, overlap=overlap))
    executor = client._engine.executor  # type: ignore[union-attr]
    submit, steps = executor.submit, []
    executor.submit = lambda plan: (steps.append(plan.num_steps), submit(plan))[1]  # type: ignore[method-assign]
    requests = [
        toy_request(
            str(i),
            prompt,
            9 + 3 * i,
            temperature=i % 2,
            seed=i,
            top_p=0.9,
            n=1 + (i == 3),
            ignore_eos=False,
            stop_token_ids=(20 + i, 50 + i),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = await asyncio.gather(*(_answer(client, request) for request in requests))
    stats = await client.stats()
    await client.close()
    return list(answers), stats, steps


async def _answer(client: InProcessClient, request: EngineRequest) -> list[tuple[list[int], object]]:
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, object] = {}
    async for delta in client.generate(request):
        for sequence in delta.sequences:
            tokens.setdefault(sequence.index, []).extend(sequence.token_ids)
            reasons[sequence.index] = (sequence.finish_reason, sequence.stop_reason)
    return [(tokens[index], reasons[index]) for index in sorted(tokens)]


@pytest.mark.parametrize("overlap", [1, 2])
async def test_an_engine_answers_the_same_with_bursts(overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "BURST_MS", 1e9)
    plain, stats, single = await _answers(0, overlap)
    burst, with_bursts, several = await _answers(4, overlap)
    assert burst == plain and any(len(tokens) > 4 for answer in plain for tokens, _ in answer)
    assert max(single) == 1 and max(several) == 4
    assert (with_bursts.generation_tokens, with_bursts.finished) == (stats.generation_tokens, stats.finished)
    assert (with_bursts.running, with_bursts.waiting) == (0, 0)


def test_take_runs_cuts_at_ends() -> None:
    toy = Toy(toy_facts(burst=4, overlap=1))
    toy.submit("a", [1, 2, 3], max_tokens=20, ignore_eos=True, stop_token_ids=(9,))
    toy.step()
    slots, chosen = toy.scheduler._ledger.slots, np.array([0], np.int32)
    known = int(slots.known[0])
    taken = bursts.take_runs(slots, chosen, np.array([[8, 9, 9, 8]], np.int32), np.array([4], np.int32))
    assert (taken.runs, taken.newest.tolist(), taken.ended.tolist()) == ([(8, 9)], [9], [True])
    assert int(slots.known[0]) == known + 2 and slots.tokens[0, known : known + 4].tolist() == [8, 9, 0, 0]
