"""Drafts change no token: right ones are kept, wrong ones cost nothing but their place, whatever the settings of the row."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from pagoda.hal.comm import Topology
from pagoda.serving.engine.core import EngineCore, Sink
from pagoda.serving.engine.executors.inprocess import InProcessExecutor
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.spec.drafter import PromptLookup
from plans import Hand, Sequence
from toy import ToyModel, dense_greedy, dense_logits, toy_request, toy_runner

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33]
GREEDY = {"temperature": 0, "max_tokens": 64}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.1, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_k": 20, "top_p": 0.9},
    {"logit_bias": {7: 3.0}},
    {"allowed_token_ids": tuple(range(40, 70)), "temperature": 1.0, "seed": 9},
]


def drafted(hand: Hand, parts: list[tuple[Sequence, list[int]]]) -> StepResult:
    """One step in which each sequence gets its newest token and drafts."""
    for sequence, ids in parts:
        sequence.tokens += ids
    widest = max(len(ids) for _, ids in parts)
    order = sorted(parts, key=lambda part: not part[1])
    drafts = np.array([ids + [-1] * (widest - len(ids)) for _, ids in order], np.int32)
    parents = np.where(drafts >= 0, np.arange(widest) - 1, -1).astype(np.int32)
    plan = hand.plan(*((sequence, 1 + len(ids)) for sequence, ids in order), drafts=drafts, parents=parents)
    for sequence, ids in order:
        del sequence.tokens[len(sequence.tokens) - len(ids) :]
    plan.draws[:] = [len(sequence.output) for sequence, _ in order]
    result = hand.runner.run(plan)
    for row, (sequence, _) in enumerate(order):
        sequence.tokens += result.tokens[row, : result.counts[row]].tolist()
        sequence.computed = len(sequence.tokens) - 1
    return result


def hand() -> Hand:
    return Hand(toy_runner(Topology(0, 1)))


@pytest.mark.parametrize("settings", SETTINGS)
def test_any_draft_gives_the_plain_runs_tokens(settings: dict[str, Any]) -> None:
    params = SamplingParams(**GREEDY | settings)
    plain = hand()
    truth = plain.generate(plain.sequence(0, PROMPT, params), 16)
    for wrong in (0, 1, 2, 3):
        made = hand()
        sequence = made.sequence(0, PROMPT, params)
        made.generate(sequence, 1)
        while len(sequence.output) < 12:
            at = len(sequence.output)
            draft = truth[at : at + 3]
            if wrong < 3:
                draft[wrong] = (draft[wrong] + 1) % 97
            result = drafted(made, [(sequence, draft)])
            assert result.counts.tolist() == [wrong + 1]
        assert sequence.output == truth[: len(sequence.output)]


def test_rows_of_several_lengths_and_none() -> None:
    made = hand()
    rows = [made.sequence(slot, PROMPT[slot:]) for slot in range(3)]
    for row in rows:
        made.generate(row, 1)
    truths = [dense_greedy(ToyModel(), PROMPT[slot:], 8) for slot in range(3)]
    result = drafted(made, [(rows[0], truths[0][1:4]), (rows[1], []), (rows[2], [truths[2][1], 0 if truths[2][2] else 1])])
    assert sorted(result.counts.tolist()) == [1, 2, 4]
    assert [row.output for row in rows] == [truth[: len(row.output)] for row, truth in zip(rows, truths)]


def test_rows_that_depend_on_their_past_accept_one_token() -> None:
    params = SamplingParams(**GREEDY, frequency_penalty=0.7, repetition_penalty=1.2)
    plain = hand()
    truth = plain.generate(plain.sequence(0, PROMPT, params), 10)
    made = hand()
    sequence = made.sequence(0, PROMPT, params)
    made.generate(sequence, 1)
    while len(sequence.output) < 10:
        at = len(sequence.output)
        assert drafted(made, [(sequence, truth[at : at + 2])]).counts.tolist() == [1]
    assert sequence.output == truth


def test_logprobs_cover_what_was_accepted() -> None:
    made = hand()
    sequence, other = made.sequence(0, PROMPT, SamplingParams(**GREEDY, logprobs=2)), made.sequence(1, PROMPT[2:])
    made.generate(sequence, 1)
    made.generate(other, 1)
    truth = dense_greedy(ToyModel(), PROMPT, 8)
    result = drafted(made, [(other, [96]), (sequence, [truth[1], truth[2], 96])])
    (index,) = result.logprobs
    rows = result.logprobs[index]
    assert rows.token_ids.tolist() == truth[1:4] == result.tokens[index, :3].tolist()
    expected = dense_logits(ToyModel(), PROMPT + truth)[len(PROMPT) : len(PROMPT) + 3].log_softmax(-1)
    np.testing.assert_allclose(rows.logprobs, [float(row[token]) for row, token in zip(expected, truth[1:4])], atol=1e-4)
    assert rows.top_ids.shape == (3, 2)


def speculating_engine(sink: Sink) -> Engine:
    executor = InProcessExecutor(lambda topology: toy_runner(topology))
    facts = executor.start()
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64), facts, drafter=PromptLookup(3))
    return Engine(EngineCore(scheduler, executor, facts, sink), executor)


async def test_a_drafting_scheduler_changes_no_answer_and_takes_fewer_steps() -> None:
    client = await InProcessClient.start(speculating_engine)
    prompts = [PROMPT, PROMPT[3:] * 3, [7] * 12]

    async def ask(index: int, **settings: Any) -> list[int]:
        request = toy_request(f"{index}{settings}", prompts[index], 40, **settings)
        return [token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids]

    answers = await asyncio.gather(*(ask(index) for index in range(3)))
    assert list(answers) == [dense_greedy(ToyModel(), prompt, 40) for prompt in prompts]
    steps = (await client.stats()).steps
    assert steps < 40
    warm = {"temperature": 0.7, "seed": 5}
    drafted_answer = await ask(0, **warm)
    await client.close()
    plain = hand()
    assert drafted_answer == plain.generate(plain.sequence(0, prompts[0], SamplingParams(max_tokens=64, **warm)), 40)
