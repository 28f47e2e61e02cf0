"""The drafter protocol on prompt lookup, and drafts in the scheduler's steps."""

from __future__ import annotations

import numpy as np
import pytest
from pagoda.hal.kv import CacheKind
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.spec.drafter import DraftState, PromptLookup
from scheduler_toy import KnowingDrafter, Toy, group, toy_facts


def propose(tokens, count=4, room=9, **sizes):
    tokens = [np.array(row, np.int32) for row in tokens]
    state = DraftState(np.arange(len(tokens), dtype=np.int32), tokens, np.full(len(tokens), room, np.int32))
    return PromptLookup(count, **sizes).propose(state)


def test_a_repeated_ending_goes_on_as_before():
    draft = propose([[1, 2, 3, 4, 5, 9, 2, 3], [7, 8, 7, 8, 7]])
    assert draft.ids.tolist() == [[4, 5, 9, 2], [8, 7, -1, -1]]
    assert draft.parents.tolist() == [[-1, 0, 1, 2]] * 2


def test_the_longest_ending_wins_and_then_the_newest_place():
    assert propose([[1, 2, 8, 3, 2, 9, 1, 2]]).ids[0, 0] == 8
    assert propose([[2, 8, 2, 9, 2]], longest=1).ids[0, 0] == 9


def test_nothing_is_guessed_without_a_match_or_room():
    assert (propose([[1, 2, 3], [5]]).ids == -1).all()
    assert (propose([[1, 2, 1]], shortest=2).ids == -1).all()
    assert propose([[1, 2, 3, 1]], room=1).ids.tolist() == [[2, -1, -1, -1]]


@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize("overlap", [1, 3])
def test_accepted_drafts_save_steps_and_change_no_token(right, overlap):
    groups = (group(4), group(4, CacheKind.SLIDING, 6, (1,)))
    toy = Toy(toy_facts(groups, num_pages=80, overlap=overlap), drafter=KnowingDrafter(right), max_num_batched_tokens=24)
    toy.submit("a", range(10), max_tokens=20, ignore_eos=True, logprobs=1)
    toy.submit("b", range(5, 12), max_tokens=21, ignore_eos=True)
    toy.submit("c", range(5, 12), max_tokens=12, temperature=1.0, n=2, ignore_eos=True)
    toy.drain()
    for name in "abc":
        toy.check_tokens(name)
    steps = len(toy.deltas["a"])
    assert -(-20 // (right + 1)) <= steps <= -(-20 // (right + 1)) + 3
    assert all(len(part.logprobs) == len(part.token_ids) for delta in toy.deltas["a"] for part in delta.sequences)
    drafted = [plan for plan in toy.plans if plan.drafts is not None]
    assert drafted and all(plan.drafts.shape == plan.parents.shape for plan in drafted)


def test_a_stop_among_accepted_drafts_ends_there():
    toy = Toy(drafter=KnowingDrafter(5), max_num_batched_tokens=32)
    toy.submit("free", range(10), max_tokens=12, ignore_eos=True)
    toy.drain()
    stop = toy.tokens["free"][0][4]
    toy.submit("a", range(10), max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    toy.drain()
    toy.check_tokens("a")
    assert toy.reasons["a"][0] is FinishReason.STOP and toy.deltas["a"][-1].sequences[0].stop_reason == stop


def test_drafts_take_only_what_budget_and_pages_are_left():
    toy = Toy(toy_facts(num_pages=9, overlap=1), drafter=KnowingDrafter(6), max_num_batched_tokens=5)
    toy.submit("a", range(8), max_tokens=12, ignore_eos=True)
    toy.submit("b", range(8), max_tokens=12, ignore_eos=True)
    toy.drain()
    assert max(plan.num_tokens for plan in toy.plans) == 5
    toy.check_tokens("a")
    toy.check_tokens("b")


@pytest.mark.parametrize("num_pages", range(11, 24))
def test_a_step_without_room_for_drafts_forgets_those_before(num_pages):
    """When pages run short, no drafts are asked for, and rows are sampled as ever."""
    toy = Toy(toy_facts(num_pages=num_pages, overlap=1), drafter=KnowingDrafter(2), max_num_batched_tokens=24)
    for i in range(4):
        toy.submit(f"r{i}", range(i, i + 9 + i), max_tokens=22, ignore_eos=True)
    toy.drain()
    for i in range(4):
        toy.check_tokens(f"r{i}")
