"""Drafts change no token: right ones are kept, wrong ones cost nothing but their place, whatever the settings of the row."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from pagoda.hal.comm import Topology
from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import StepResult
from pagoda.serving.engine.spec.drafter import Draft, DraftState, PromptLookup
from plans import Hand, Sequence
from slow_steps import HandBrake, side_by_side, slow_engine
from toy import ToyModel, dense_greedy, dense_logits, toy_engine, toy_request, toy_runner

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


@pytest.mark.parametrize(
    "settings",
    [
        {"frequency_penalty": 1.7, "repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "temperature": 0.9, "seed": 11},
        {"bad_words_token_ids": tuple((i, j) for i in range(97) for j in range(0, 97, 3))},
        {"min_tokens": 20, "stop_token_ids": tuple(range(0, 97, 4))},
    ],
)
@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_rows_that_depend_on_their_past_do_so_at_each_draft(settings: dict[str, Any], wrong: int) -> None:
    params = SamplingParams(**GREEDY | settings)
    plain = hand()
    start = plain.sequence(0, PROMPT, params)
    truth = []
    while len(truth) < 24:  # by the scheduler's own way: a bound row's tokens come from the host
        plain.run((start, len(start.tokens) - start.computed))
        truth = start.output
    free = hand()
    assert truth != free.generate(free.sequence(0, PROMPT, SamplingParams(**GREEDY)), 24)
    made = hand()
    sequence = made.sequence(0, PROMPT, params)
    made.generate(sequence, 1)
    while len(sequence.output) < 20:
        at = len(sequence.output)
        draft = truth[at : at + 4]
        if wrong < 4:
            draft[wrong] = (draft[wrong] + 1) % 97
        assert drafted(made, [(sequence, draft)]).counts.tolist() == [min(wrong, 4) + 1]
    assert sequence.output == truth[: len(sequence.output)]


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
    return toy_engine(sink, drafter=PromptLookup(3))


class Greedy:
    """Guesses the model's own greedy tokens, whatever the row's settings are."""

    branches = False
    wants = ()
    caches = ()

    def propose(self, state: DraftState) -> Draft:
        guesses = [
            dense_greedy(ToyModel(), row.tolist(), min(2, room)) for row, room in zip(state.tokens, state.room.tolist(), strict=True)
        ]
        ids = np.array([guess + [-1] * (2 - len(guess)) for guess in guesses], np.int32)
        return Draft(ids, np.broadcast_to(np.array([-1, 0], np.int32), ids.shape))


async def test_samples_have_the_models_distribution() -> None:
    client = await InProcessClient.start(partial(toy_engine, drafter=Greedy(), budget=256))
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(6):
        request = toy_request(f"{seed}", PROMPT, 3, temperature=1.0, top_k=3, n=100, seed=seed)
        answers: dict[int, list[int]] = {}
        async for delta in client.generate(request):
            for part in delta.sequences:
                answers.setdefault(part.index, []).extend(part.token_ids)
        seen.update(tuple(answer) for answer in answers.values())
    stats = await client.stats()
    await client.close()
    assert 0 < stats.accepted_tokens < stats.draft_tokens and sum(stats.accepted_at) == stats.accepted_tokens
    expected: dict[tuple[int, ...], float] = {(): 600.0}
    for _ in range(3):
        grown = {}
        for path, count in expected.items():
            best = dense_logits(ToyModel(), PROMPT + list(path))[-1].topk(3)
            shares = best.values.softmax(0).tolist()
            grown |= {(*path, token): count * share for token, share in zip(best.indices.tolist(), shares)}
        expected = grown
    assert sum(seen.values()) == 600 and set(seen) <= set(expected)
    cells = [path for path, count in expected.items() if count >= 5]
    chi = sum((seen[path] - expected[path]) ** 2 / expected[path] for path in cells)
    rest = 600 - sum(expected[path] for path in cells)
    chi += (600 - sum(seen[path] for path in cells) - rest) ** 2 / max(rest, 1.0)
    assert chi < len(cells) + 3.1 * (2 * len(cells)) ** 0.5, (chi, len(cells))  # one in a thousand would be above


async def test_a_drafting_scheduler_changes_no_answer_and_takes_fewer_steps() -> None:
    client = await InProcessClient.start(partial(slow_engine, speculating_engine, brake := HandBrake()))
    prompts = [PROMPT, PROMPT[3:] * 3, [7] * 12]

    async def ask(index: int, **settings: Any) -> list[int]:
        request = toy_request(f"{index}{settings}", prompts[index], 40, **settings)
        return [token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids]

    answers = await side_by_side(client, brake, *(ask(index) for index in range(3)))
    assert answers == [dense_greedy(ToyModel(), prompt, 40) for prompt in prompts]
    steps = (await client.stats()).steps
    assert steps < 40
    warm = {"temperature": 0.7, "seed": 5}
    drafted_answer = await ask(0, **warm)
    await client.close()
    plain = hand()
    assert drafted_answer == plain.generate(plain.sequence(0, prompts[0], SamplingParams(max_tokens=64, **warm)), 40)
