"""Hidden states of named layers reach the step's result and the drafter that asked: of the right tokens, whatever happened on the way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagoda.hal.comm import Topology
from pagoda.hal.kv import LayerCache
from pagoda.serving.engine.batch import BatchPacker
from pagoda.serving.engine.build import build_runner
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.spec.drafter import Draft, DraftState
from plans import Hand
from slow_steps import HandBrake, side_by_side, slow_engine
from tiny import tiny_config
from toy import ToyModel, dense_greedy, dense_states, toy_engine, toy_request, toy_runner

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33]


def assert_states(got: np.ndarray, tokens: list[int], layers: tuple[int, ...], start: int) -> None:
    wanted = dense_states(ToyModel(), tokens)[list(layers)][:, start : start + got.shape[1]]
    torch.testing.assert_close(torch.from_numpy(got).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [(1,), (0, 1), (1, 0)])
def test_rows_that_ask_get_the_states_of_their_tokens(layers: tuple[int, ...]) -> None:
    hand = Hand(toy_runner(Topology(0, 1)))
    first, second, third = (hand.sequence(slot, PROMPT[slot:]) for slot in range(3))
    result = hand.run((first, 4), (second, 8), (third, 3), taps=layers, tapped=np.array([True, False, True]))
    assert {row: states.shape[:2] for row, states in result.hidden.items()} == {0: (len(layers), 4), 2: (len(layers), 3)}
    assert_states(result.hidden[0], first.tokens, layers, 0)
    assert_states(result.hidden[2], third.tokens, layers, 0)
    result = hand.run((first, 5), (second, 1), taps=layers, tapped=np.array([True, True]))
    assert_states(result.hidden[0], first.tokens[:-1], layers, 4)
    assert_states(result.hidden[1], second.tokens[:-1], layers, 8)
    assert hand.run((second, 1)).hidden == {}


def test_rejected_drafts_give_no_states_and_accepted_ones_those_of_their_path() -> None:
    hand = Hand(toy_runner(Topology(0, 1)))
    sequence = hand.sequence(0, PROMPT)
    hand.generate(sequence, 1)
    known, right = list(sequence.tokens), dense_greedy(ToyModel(), PROMPT, 4)[1:]
    # A tree: a wrong token and the right one after the known ones, then the right next one, then a wrong one.
    drafts, parents = [(right[0] + 1) % 97, right[0], right[1], (right[2] + 1) % 97], [-1, -1, 1, 2]
    sequence.tokens = known + drafts
    columns = {"drafts": np.array([drafts], np.int32), "parents": np.array([parents], np.int32)}
    plan = hand.plan((sequence, 5), taps=(0, 1), tapped=np.array([True]), **columns)
    plan.draws[:] = 1
    result = hand.runner.run(plan)
    assert result.tokens[0, :3].tolist() == right and result.counts.tolist() == [3]
    assert result.hidden[0].shape[1] == 3
    assert_states(result.hidden[0], known + right[:2], (0, 1), len(known) - 1)


class Reader:
    """Guesses right and wrong by turns, and checks the states that it is given: the head must make the known tokens of them."""

    branches = False
    wants = (1,)
    caches: tuple[LayerCache, ...] = ()

    def __init__(self) -> None:
        self.model = ToyModel()
        self.seen: dict[int, int] = {}
        self.calls = 0

    def propose(self, state: DraftState) -> Draft:
        self.calls += 1
        ids = np.full((len(state.slots), 3), -1, np.int32)
        assert len(state.hidden) == len(state.slots)
        for row, (tokens, given, room) in enumerate(zip(state.tokens, state.hidden, state.room.tolist(), strict=True)):
            assert given is not None and given.start + given.states.shape[1] == len(tokens) - 1
            assert given.start <= self.seen.get(int(tokens[0]), 0)  # no gap; prompts begin differently
            self.seen[int(tokens[0])] = len(tokens) - 1
            assert_states(given.states, tokens.tolist(), (1,), given.start)
            says = self.model.logits(torch.from_numpy(given.states[0])).argmax(-1).tolist()
            answered = max(given.start, len(PROMPT) - 1) - given.start
            assert says[answered:] == tokens[given.start + answered + 1 :].tolist()
            guess = dense_greedy(self.model, tokens.tolist(), 3)[:room]
            guess[self.calls % 3 : self.calls % 3 + 1] = [0] if guess[self.calls % 3 : self.calls % 3 + 1] else []
            ids[row, : len(guess)] = guess
        return Draft(ids, np.broadcast_to(np.arange(-1, 2, dtype=np.int32), ids.shape).copy())


@pytest.mark.parametrize(("num_pages", "world"), [(600, 0), (26, 0), (600, 2)])
async def test_a_drafter_reads_the_states_of_what_was_computed(num_pages: int, world: int) -> None:
    """In chunks, side by side, with drafts kept and rejected; with few pages also after preemption."""
    reader = Reader()
    starter = partial(toy_engine, drafter=reader, budget=6, num_pages=num_pages, world=world)
    client = await InProcessClient.start(partial(slow_engine, starter, brake := HandBrake()))

    async def ask(name: str, turn: int) -> list[int]:
        request = toy_request(name, PROMPT[turn:] + PROMPT[:turn], 24)
        return [token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids]

    answers = await side_by_side(client, brake, *(ask(f"r{turn}", turn) for turn in range(3)))
    stats = await client.stats()
    await client.close()
    assert list(answers) == [dense_greedy(ToyModel(), PROMPT[turn:] + PROMPT[:turn], 24) for turn in range(3)]
    assert reader.calls > 5 and 0 < stats.accepted_tokens < stats.draft_tokens
    assert (stats.preemptions > 0) == (num_pages < 100)


def test_a_zoo_model_with_native_kernels_gives_the_same_tokens_and_states_by_any_chunks(tmp_path: Path) -> None:
    """Steps without taps are recorded and fused, those with them run as they are."""
    hand = Hand(build_runner(tiny_config(tmp_path), Topology(0, 1)))
    plain, whole, parts = (hand.sequence(slot, PROMPT, SamplingParams(temperature=0, max_tokens=64)) for slot in range(3))
    answer = hand.generate(plain, 6)
    taps: dict[str, Any] = {"taps": (0, 1), "tapped": np.array([True])}
    wanted = hand.run((whole, len(PROMPT)), **taps).hidden[0]
    found = [hand.run((parts, count), **taps).hidden[0] for count in (2, 4, 3)]
    np.testing.assert_allclose(np.concatenate(found, axis=1), wanted, rtol=1e-4, atol=1e-5)
    states = [hand.run((parts, 1), **taps).hidden[0] for _ in range(5)]
    assert parts.output == answer and all(state.shape == (2, 1, 64) for state in states)


def test_the_header_says_which_layers_are_tapped() -> None:
    runner = toy_runner(Topology(0, 1))
    hand = Hand(runner)
    packer: BatchPacker = runner._packer
    sequence = hand.sequence(0, PROMPT)
    batch = packer.pack(hand.plan((sequence, 4), taps=(1, 0), tapped=np.array([True])))
    assert batch.taps == (1, 0)
    assert batch.views["tap_layers"].tolist() == [1, 0] and batch.views["tap_rows"].tolist() == [0, 1, 2, 3]
    assert "tap_rows" not in packer.pack(hand.plan((sequence, 2))).views
