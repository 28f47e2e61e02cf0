"""Drafts that branch: attention sees a draft's own path alone, and every answer is that of a plain run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pagoda.hal.comm import Topology
from pagoda.hal.errors import ConfigError
from pagoda.ops.attention import TreeMask
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.spec.drafter import Draft, DraftState
from plans import Hand
from scheduler_toy import Branching, Toy, group, toy_facts
from slow_steps import HandBrake, side_by_side, slow_engine
from toy import ToyModel, dense_greedy, dense_logits, toy_engine, toy_request, toy_runner

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33]


def test_each_draft_has_the_logits_of_its_own_path() -> None:
    made = Hand(toy_runner(Topology(0, 1)))
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=3)
    sequence = made.sequence(0, PROMPT, params)
    truth = made.generate(sequence, 1) + dense_greedy(ToyModel(), PROMPT, 6)[1:]
    a, b, c, d = truth[1:5]
    wrong = (a + 1) % 97
    ids, parents = [wrong, a, (b + 2) % 97, b, c, 7, d], [-1, -1, 1, 1, 3, 0, 4]
    sequence.tokens += ids
    drafts = {"drafts": np.array([ids], np.int32), "parents": np.array([parents], np.int32)}
    plan = made.plan((sequence, 1 + len(ids)), **drafts)
    result = made.runner.run(plan)
    assert result.tokens[0, : result.counts[0]].tolist() == truth[1:6] and result.in_place is not None and result.in_place.tolist() == [0]
    expected = dense_logits(ToyModel(), PROMPT + truth)[len(PROMPT) : len(PROMPT) + 5].log_softmax(-1)
    got = result.logprobs[0]
    assert got.token_ids.tolist() == truth[1:6]
    np.testing.assert_allclose(got.logprobs, [float(row[token]) for row, token in zip(expected, truth[1:6])], atol=1e-4)


class Guesser:
    """Two of the model's best tokens at each of two depths, the better one second, so that the path that is right is never in place."""

    branches, wants, caches = True, (), ()

    def propose(self, state: DraftState) -> Draft:
        ids, parents = np.full((len(state.slots), 4), -1, np.int32), np.full((len(state.slots), 4), -1, np.int32)
        for row, (known, room) in enumerate(zip(state.tokens, state.room.tolist(), strict=True)):
            best, second = dense_logits(ToyModel(), known.tolist())[-1].topk(2).indices.tolist()
            after = dense_logits(ToyModel(), [*known.tolist(), best])[-1].topk(2).indices.tolist()
            ids[row, :room] = [second, best, *reversed(after)][:room]
            parents[row, :room] = [-1, -1, 1, 1][:room]
        return Draft(ids, parents)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.8, "seed": 4},
        {"frequency_penalty": 1.5},
        {"bad_words_token_ids": tuple((i, j) for i in range(97) for j in range(0, 97, 3))},
    ],
)
async def test_trees_change_no_answer(settings: dict[str, Any]) -> None:
    answers, steps = [], []
    for drafter in (None, Guesser()):
        client = await InProcessClient.start(partial(slow_engine, partial(toy_engine, drafter=drafter), brake := HandBrake()))

        async def ask(index: int, client: InProcessClient = client) -> list[int]:
            request = toy_request(f"{index}", PROMPT[index:], 24, **settings)
            return [token async for delta in client.generate(request) for part in delta.sequences for token in part.token_ids]

        answers.append(await side_by_side(client, brake, *(ask(index) for index in range(3))))
        stats = await client.stats()
        steps.append(stats.steps)
        await client.close()
    assert answers[0] == answers[1] and steps[1] < 0.8 * steps[0] and stats.accepted_tokens > 10


@pytest.mark.parametrize("overlap", [1, 3])
def test_what_is_not_in_place_is_computed_again(overlap: int) -> None:
    toy = Toy(toy_facts((group(4), group(2, layers=(1,))), num_pages=80, overlap=overlap), drafter=Branching(3), max_num_batched_tokens=32)
    toy.submit("a", range(10), max_tokens=20, ignore_eos=True)
    toy.submit("b", range(5, 12), max_tokens=21, temperature=1.0, n=2, ignore_eos=True)
    toy.drain()
    toy.check_tokens("a")
    toy.check_tokens("b")
    steps = sum(0 in plan.slots[plan.sampled] for plan in toy.plans)  # of a, which came first
    assert steps <= 8 + overlap
    assert any(length > 1 for plan in toy.plans[3:] if plan.drafts is not None for length in plan.lengths - (plan.drafts >= 0).sum(1))


def test_attention_that_takes_no_trees_refuses_their_drafter() -> None:
    with pytest.raises(ConfigError, match="drafts that branch"):
        Scheduler(SchedulerConfig(), replace(toy_facts(), trees=False), drafter=Branching(1))


def test_a_chain_as_a_tree_is_a_chain() -> None:
    """The reference kernel with a mask that says what causality says anyway."""
    from_tree, plain = (Hand(toy_runner(Topology(0, 1))) for _ in range(2))
    for made in (from_tree, plain):
        sequence = made.sequence(0, PROMPT)
        made.generate(sequence, 1)
        sequence.tokens += [4, 8, 15]
        made.batch = made.runner._packer.pack(made.plan((sequence, 4)))
    groups = from_tree.batch.groups()
    seen, nodes = torch.tensor([-1, 1, 3, 7]), torch.tensor([3], dtype=torch.int32)
    masked = tuple(replace(one, tree=TreeMask(nodes, seen)) for one in groups)
    one = from_tree.runner._forward.hidden(from_tree.batch, masked, (None, None))
    other = plain.runner._forward.hidden(plain.batch, plain.batch.groups(), (None, None))
    torch.testing.assert_close(one, other)
