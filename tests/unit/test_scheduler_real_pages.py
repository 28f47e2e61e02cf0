"""Invariant 3 on real pages: whatever the chunks, preemptions, hits, samples, beams and overlap, tokens are those of a dense forward."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from pagoda.hal.comm import Topology
from pagoda.serving.engine.beams import BeamSearch
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest, RequestDelta
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from scheduler_toy import search_alone
from toy import EOS, VOCAB, ToyModel, dense_greedy, dense_logits, toy_engine, toy_runner


def serve(
    requests: list[EngineRequest], num_pages: int, budget: int, overlap: int, max_num_seqs: int = 8
) -> tuple[Scheduler, dict[str, list[RequestDelta]]]:
    """The engine's loop without its thread; one request is submitted per turn."""
    runner = toy_runner(Topology(0, 1), num_pages=num_pages, max_num_seqs=max_num_seqs, overlap=overlap)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs, budget), runner.facts)
    waiting, in_flight, heard = deque(requests), deque(), {request.request_id: [] for request in requests}
    while waiting or scheduler.has_work:
        if waiting:
            scheduler.submit(waiting.popleft())
        while (plan := scheduler.plan()) is not None:
            in_flight.append((plan, runner.launch(plan)))
        if in_flight:
            plan, pending = in_flight.popleft()
            for delta in scheduler.commit(plan, pending.wait()):
                heard[delta.request_id].append(delta)
    assert scheduler.stats().pages_used == 0
    return scheduler, heard


def tokens_of(deltas: list[RequestDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas for part in delta.sequences if part.index == index for token in part.token_ids]


def greedy(name: str, prompt, max_tokens: int, **params) -> EngineRequest:
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    return EngineRequest(name, tuple(prompt), SamplingParams(**settings), (EOS,))


@pytest.mark.parametrize(("num_pages", "budget", "overlap"), [(400, 64, 2), (400, 7, 3), (46, 16, 2), (46, 64, 1)])
def test_greedy_tokens_are_those_of_a_dense_forward(num_pages, budget, overlap):
    model, shared = ToyModel(), list(range(10, 31))
    prompts = [[*shared[: 21 - 3 * (i % 3)], 40 + i, *range(2, 2 + i)] for i in range(8)]
    requests = [greedy(f"r{i}", prompt, 12 + i) for i, prompt in enumerate(prompts)]
    requests.insert(4, greedy("samples", shared, 9, n=3))
    scheduler, heard = serve(requests, num_pages, budget, overlap)
    stats = scheduler.stats()
    assert stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (num_pages == 46)
    for request in requests:
        expected = dense_greedy(model, request.prompt, request.params.max_tokens)
        for index in range(request.params.n):
            assert tokens_of(heard[request.request_id], index) == expected


@pytest.mark.parametrize(("num_pages", "width"), [(400, 4), (46, 2)])
def test_beams_are_those_of_a_dense_forward(num_pages, width):
    model = ToyModel()
    requests = [greedy(f"r{i}", range(5 + i, 25), 14) for i in range(4)]
    beam = EngineRequest("beam", tuple(range(30, 41)), SamplingParams(temperature=0.0, max_tokens=10, n=2), (EOS,), beam_width=width)
    _, heard = serve([*requests[:2], beam, *requests[2:]], num_pages, 16, 2)

    def top(tokens):
        best = torch.log_softmax(dense_logits(model, tokens)[-1], -1).topk(VOCAB)
        return list(zip(best.indices.tolist(), best.values.tolist()))

    expected = search_alone(BeamSearch(width, frozenset((EOS,)), 1.0), beam.prompt, 21, top)[:2]
    (delta,) = heard["beam"]
    assert [part.token_ids for part in delta.sequences] == [one.tokens for one in expected]
    assert [part.cumulative_logprob for part in delta.sequences] == pytest.approx([one.cumulative for one in expected], abs=1e-3)
    for request in requests:
        assert tokens_of(heard[request.request_id]) == dense_greedy(model, request.prompt, 14)


def test_samples_differ_from_each_other_and_repeat_with_the_seed():
    answers = []
    for budget, overlap in ((64, 2), (5, 1)):
        requests = [greedy("s", range(10, 30), 12, n=4, temperature=1.5, seed=11), greedy("r", range(3, 20), 20)]
        _, heard = serve(requests, 400, budget, overlap)
        answers.append([tokens_of(heard["s"], index) for index in range(4)])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 4


async def test_a_client_forks_an_answer_that_streams():
    client = await InProcessClient.start(toy_engine)
    prompt, heard, fork = list(range(10, 30)), {0: [], 1: []}, None
    async for delta in client.generate(greedy("a", prompt, 200)):
        for part in delta.sequences:
            heard[part.index] += part.token_ids
        if fork is None and len(heard[0]) >= 6:
            fork = await client.call("fork", request_id="a", token=50, at=6)
    await client.close()
    model = ToyModel()
    assert fork == 1 and (len(heard[0]), len(heard[1])) == (200, 193)
    assert heard[0][:30] == dense_greedy(model, prompt, 30)
    assert heard[1][:30] == dense_greedy(model, [*prompt, *heard[0][:6], 50], 30)
