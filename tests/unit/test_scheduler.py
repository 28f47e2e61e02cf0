"""The scheduler against simulated pages: each behaviour by itself."""

from __future__ import annotations

import numpy as np
import pytest
from pagoda.hal.errors import CapacityError, ConfigError, RequestError
from pagoda.hal.kv import CacheKind
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.params import _RANGES
from pagoda.serving.engine.plan import ON_DEVICE, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from pagoda.serving.engine.sequence import State
from scheduler_toy import EOS, Toy, expected_tokens, group, toy_facts


def test_one_request_runs_to_its_limit():
    toy = Toy()
    toy.submit("a", range(10, 20), max_tokens=6, ignore_eos=True)
    toy.drain()
    toy.check_tokens("a")
    assert toy.reasons["a"][0] is FinishReason.LENGTH
    assert toy.deltas["a"][-1].finished and not toy.deltas["a"][0].finished
    assert toy.scheduler.stats().finished == {"length": 1}


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_decode_rows_overlap_with_tokens_on_the_device(overlap):
    toy = Toy(toy_facts(overlap=overlap))
    toy.submit("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    planned = 0
    while toy.plan() is not None:
        planned += 1
    assert planned == overlap
    assert [plan.token_ids.tolist() for plan in toy.plans[1:]] == [[ON_DEVICE]] * (overlap - 1)
    toy.drain()
    toy.check_tokens("a")


def test_overshoot_of_a_stop_is_taken_back():
    toy = Toy(toy_facts(overlap=3))
    prompt = [1, 2, 3]
    tokens, _ = expected_tokens_of(prompt, 12)
    stop = tokens[4]
    toy.submit("a", prompt, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    toy.drain()
    toy.check_tokens("a")
    assert toy.deltas["a"][-1].sequences[0].stop_reason == stop
    assert toy.reasons["a"][0] is FinishReason.STOP
    assert toy.scheduler.stats().steps > len(toy.tokens["a"][0])


def expected_tokens_of(prompt, count):
    toy = Toy()
    toy.submit("x", prompt, max_tokens=count, ignore_eos=True)
    return expected_tokens(toy.requests["x"], 64)


def test_the_end_token_gives_no_stop_reason_and_min_tokens_hold_it_back():
    prompt = next([a, b] for a in range(50) for b in range(50) if expected_tokens_of([a, b], 1)[0] == [EOS])
    toy = Toy()
    toy.submit("a", prompt, max_tokens=9)
    toy.submit("b", prompt, max_tokens=9, min_tokens=4)
    toy.drain()
    assert toy.tokens["a"][0] == [EOS]
    assert toy.deltas["a"][-1].sequences[0].stop_reason is None
    assert len(toy.tokens["b"][0]) >= 4
    toy.check_tokens("b")


def test_a_long_prompt_is_chunked_while_others_decode():
    toy = Toy(max_num_batched_tokens=8)
    toy.submit("short", [1, 2], max_tokens=12, ignore_eos=True)
    toy.step()
    toy.submit("long", range(10, 40), max_tokens=3, ignore_eos=True)
    toy.drain()
    assert max(plan.num_tokens for plan in toy.plans) == 8
    mixed = [plan for plan in toy.plans if plan.num_rows == 2 and plan.lengths[0] > 1]
    assert len(mixed) >= 4 and all(plan.lengths[-1] == 1 for plan in mixed)
    assert [bool(plan.sampled[0]) for plan in mixed][:3] == [False] * 3
    for name in toy.requests:
        toy.check_tokens(name)


def test_decodes_are_not_stalled_by_a_prompt_before_them():
    toy = Toy(toy_facts(overlap=1), max_num_batched_tokens=8, scheduling_policy="priority")
    for name in "ab":
        toy.submit(name, [1, 2, ord(name) % 50], max_tokens=14, ignore_eos=True, request={"priority": 1})
    toy.step()
    toy.submit("urgent", range(40), max_tokens=2, ignore_eos=True)
    toy.drain()
    mixed = [plan for plan in toy.plans[1:] if plan.lengths[0] > 1]
    assert len(mixed) >= 6 and all(plan.lengths.tolist() == [6, 1, 1] for plan in mixed[:6])
    toy.check_tokens("urgent")


def test_long_prefill_threshold_and_whole_prompts():
    toy = Toy(long_prefill_token_threshold=3)
    toy.submit("a", range(20), max_tokens=2, ignore_eos=True)
    toy.drain()
    assert max(plan.num_tokens for plan in toy.plans) == 3
    toy.check_tokens("a")
    whole = Toy(toy_facts(max_model_len=32), enable_chunked_prefill=False, max_num_batched_tokens=32)
    whole.submit("a", range(20), max_tokens=4, ignore_eos=True)
    whole.submit("b", range(20, 40), max_tokens=4, ignore_eos=True)
    whole.drain()
    assert sorted(plan.num_tokens for plan in whole.plans)[-2:] == [20, 21]
    with pytest.raises(ConfigError, match="16 must reach max_model_len=64"):
        Toy(enable_chunked_prefill=False)


def test_a_prefix_is_found_and_its_tokens_are_reported():
    toy = Toy()
    toy.submit("a", range(18), max_tokens=2, ignore_eos=True)
    toy.drain()
    toy.submit("b", [*range(18), 30], max_tokens=2, ignore_eos=True)
    toy.submit("c", range(16), max_tokens=2, ignore_eos=True)
    toy.submit("salted", range(18), max_tokens=2, ignore_eos=True, request={"cache_salt": "s"})
    toy.drain()
    assert [toy.deltas[name][0].cached_tokens for name in ("a", "b", "c", "salted")] == [0, 16, 12, 0]
    stats = toy.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (18 + 19 + 16 + 18, 28)
    assert toy.scheduler.reset_prefix_cache()
    toy.submit("d", range(18), max_tokens=2, ignore_eos=True)
    assert toy.scheduler.stats().pages_cached == 0
    toy.step()
    assert not toy.scheduler.reset_prefix_cache()
    toy.drain()
    assert toy.deltas["d"][0].cached_tokens == 0


def test_prompt_logprobs_come_once_and_bypass_the_prefix_cache():
    toy = Toy(max_num_batched_tokens=5)
    toy.submit("a", range(18), max_tokens=2, ignore_eos=True)
    toy.drain()
    toy.submit("b", range(18), max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=2)
    toy.drain()
    first = toy.deltas["b"][0]
    assert first.cached_tokens == 0
    assert [entry.token_id for entry in first.prompt_logprobs] == list(range(1, 18))
    assert [entry.logprob for entry in first.prompt_logprobs] == [-float(p) for p in range(1, 18)]
    assert all(delta.prompt_logprobs is None for delta in toy.deltas["b"][1:])
    assert [len(delta.sequences[0].logprobs[0].top_ids) for delta in toy.deltas["b"]] == [2, 2, 2]


def test_preempted_requests_give_the_same_tokens(caplog):
    toy = Toy(toy_facts(num_pages=14))
    for i in range(4):
        toy.submit(f"r{i}", range(i, i + 10), max_tokens=20, ignore_eos=True)
    toy.drain()
    preemptions = toy.scheduler.stats().preemptions
    assert preemptions > 0
    assert len(caplog.messages) == preemptions.bit_length() and "fill the 13 pages of the KV cache" in caplog.messages[0]
    for name in toy.requests:
        toy.check_tokens(name)
    ends = {name: next(i for i, _ in enumerate(toy.deltas[name]) if _.finished) for name in toy.requests}
    assert set(ends.values()) == {19}


def test_a_request_alone_takes_the_whole_pool_but_no_more():
    toy = Toy(toy_facts(num_pages=9))
    toy.submit("fits", range(20), max_tokens=12, ignore_eos=True)
    with pytest.raises(CapacityError, match="33 tokens need 9 KV pages and the pool has 8") as caught:
        toy.submit("large", range(20), max_tokens=13)
    assert (caught.value.asked, caught.value.available) == (9, 8)
    toy.drain()
    toy.check_tokens("fits")


def test_wrong_requests_are_refused_with_the_number():
    toy = Toy()
    with pytest.raises(RequestError, match="64 tokens and the model's length is 64"):
        toy.submit("a", [1] * 64)
    with pytest.raises(RequestError, match="at least one"):
        toy.submit("a", [])
    with pytest.raises(RequestError, match="prompt holds the token id 50; the model's ids go from 0 to 49"):
        toy.submit("a", [1, 50])
    with pytest.raises(RequestError, match="holds the token id -1; the model's"):
        toy.submit("a", [1, -1])
    toy.submit("a", [1])
    with pytest.raises(RequestError, match="already running"):
        toy.submit("a", [1])


def test_max_tokens_none_ends_at_the_models_length():
    toy = Toy()
    toy.submit("a", [1, 2, 3], max_tokens=None, ignore_eos=True)
    toy.drain()
    assert len(toy.tokens["a"][0]) == 61
    toy.check_tokens("a")


def test_abort_frees_within_a_step_and_says_so():
    toy = Toy(toy_facts(overlap=2))
    toy.submit("a", range(10), max_tokens=20, ignore_eos=True)
    toy.submit("b", range(10), max_tokens=20, ignore_eos=True)
    toy.step()
    toy.hear(toy.scheduler.abort(["a", "b", "unknown"]))
    assert toy.reasons == {"a": {0: FinishReason.ABORT}, "b": {0: FinishReason.ABORT}}
    assert toy.deltas["a"][-1].finished
    while toy.ranks.in_flight:
        toy.commit()
    assert toy.scheduler.stats().pages_used == 0 and not toy.scheduler.has_work
    assert toy.plan() is None


def test_a_row_of_nan_fails_its_own_request():
    toy = Toy(toy_facts(overlap=1))
    toy.submit("a", range(10), max_tokens=5, ignore_eos=True)
    toy.submit("b", range(5), max_tokens=5, ignore_eos=True)
    toy.plan()
    plan, result = toy.ranks.run()
    toy.hear(toy.scheduler.commit(plan, StepResult(result.step, result.tokens, result.counts, bad_rows=(0,))))
    assert toy.reasons["a"] == {0: FinishReason.ERROR} and "NaN" in toy.deltas["a"][0].error
    toy.drain()
    toy.check_tokens("b")


def test_a_failed_engine_answers_everybody():
    toy = Toy()
    for name in "abc":
        toy.submit(name, range(10), max_tokens=5)
    toy.step()
    toy.hear(toy.scheduler.fail("the device is gone"))
    assert all(toy.deltas[name][-1].error == "the device is gone" and toy.deltas[name][-1].finished for name in "abc")
    assert not toy.scheduler.has_work and toy.scheduler.stats().pages_used == 0


def test_bound_rows_that_came_apart_share_their_steps():
    toy = Toy()
    for name in "ab":  # the second comes when a step of the first is in flight
        toy.submit(name, [1, 2, 3], max_tokens=12, ignore_eos=True, bad_words_token_ids=((49,),))
        assert toy.plan() is not None
    toy.drain()
    assert [plan.num_rows for plan in toy.plans] == [1, 1, *[2] * 11]


def test_bound_rows_wait_for_no_prompt():
    toy = Toy(toy_facts(max_model_len=256, num_pages=80), max_num_batched_tokens=8)
    bound = {"ignore_eos": True, "bad_words_token_ids": ((49,),)}
    toy.submit("a", [1, 2, 3], max_tokens=12, **bound)
    toy.plan()
    toy.submit("long", [5] * 200, max_tokens=2, **bound)
    toy.drain()
    with_a = [index for index, plan in enumerate(toy.plans) if 0 in plan.slots]
    assert len(with_a) == 12 and with_a[-1] <= 24


def test_bound_rows_sit_out_until_their_token_is_known():
    toy = Toy(toy_facts(overlap=3))
    toy.submit("bound", [1, 2, 3], max_tokens=6, ignore_eos=True, bad_words_token_ids=((49,),))
    toy.submit("free", [4, 5, 6], max_tokens=6, ignore_eos=True)
    toy.drain()
    for plan in toy.plans:
        assert (plan.token_ids[-plan.num_rows :][plan.bound] != ON_DEVICE).all()
    toy.check_tokens("bound")
    toy.check_tokens("free")


def test_gates_hold_a_request_until_each_is_open():
    toy = Toy()
    toy.submit("b", [9, 9], max_tokens=2, ignore_eos=True, gates=(State.WAITING_GRAMMAR, State.WAITING_ENCODER))
    assert toy.plan() is None and toy.scheduler.has_work and toy.scheduler.stats().waiting == 1
    toy.scheduler.open_gate("b", State.WAITING_GRAMMAR)
    assert toy.plan() is None
    toy.scheduler.open_gate("b", State.WAITING_ENCODER)
    toy.drain()
    toy.check_tokens("b")


def test_priority_runs_first_and_is_preempted_last():
    toy = Toy(toy_facts(num_pages=12, overlap=1), max_num_seqs=2, scheduling_policy="priority")
    for name, priority in (("low", 5), ("mid", 3), ("high", 0)):
        toy.submit(name, range(10), max_tokens=16, ignore_eos=True, request={"priority": priority})
    toy.drain()
    assert toy.ended == ["high", "mid", "low"]
    assert toy.scheduler.stats().preemptions > 0
    with pytest.raises(ConfigError, match="'lifo' is unknown"):
        Scheduler(SchedulerConfig(scheduling_policy="lifo"), toy_facts())


def test_parallel_samples_share_the_prompt():
    toy = Toy(toy_facts(num_pages=60), max_num_seqs=8)
    toy.submit("a", range(18), n=4, temperature=1.0, max_tokens=6, ignore_eos=True)
    toy.drain()
    toy.check_tokens("a")
    assert len({tuple(tokens) for tokens in toy.tokens["a"].values()}) > 1
    assert sum(plan.num_tokens for plan in toy.plans) <= 18 + 3 + 4 * 6
    copies = [plan.copies for plan in toy.plans if plan.copies is not None]
    assert len(copies) == 1 and len(copies[0].target) == 3


def test_a_fork_continues_its_parent_from_a_chosen_place():
    toy = Toy(toy_facts(num_pages=60, overlap=2), max_num_seqs=8)
    toy.submit("a", range(13), max_tokens=20, ignore_eos=True)
    while len(toy.tokens["a"].get(0, ())) < 8:
        toy.step()
    begun = list(toy.tokens["a"][0])
    forks = {toy.scheduler.fork("a", *how): output for how, output in (
        ((None,), begun), ((33,), [*begun, 33]), ((34, 0, 5), [*begun[:5], 34]), ((35, 0, 0), [35]),
    )}  # fmt: skip
    assert list(forks) == [1, 2, 3, 4]
    for how, message in (((50,), "50 is not in"), ((1, 9), "no live sequence 9"), ((1, 0, 99), "8 output tokens so far")):
        with pytest.raises(RequestError, match=message):
            toy.scheduler.fork("a", *how)
    toy.plan()
    assert toy.plans[-1].num_tokens == 5 and len(toy.plans[-1].copies.target) >= 3
    toy.drain()
    toy.check_tokens("a")
    for index, output in forks.items():
        tokens, reason = expected_tokens(toy.requests["a"], 64, index, output)
        assert (toy.tokens["a"][index], toy.reasons["a"][index]) == (tokens, reason)


@pytest.mark.parametrize("seats", [1, 2])
def test_parallel_samples_run_in_turns_where_slots_are_few(seats):
    toy = Toy(max_num_seqs=seats)
    toy.submit("a", range(18), n=3, temperature=1.0, max_tokens=6, ignore_eos=True)
    toy.drain()
    toy.check_tokens("a")


def test_sliding_and_chunked_groups_drop_what_no_query_reads():
    groups = (group(4), group(4, CacheKind.SLIDING, 8, (1,)), group(2, CacheKind.CHUNKED, 6, (2,)))
    toy = Toy(toy_facts(groups, num_pages=60))
    toy.submit("a", range(30), max_tokens=20, ignore_eos=True)
    most = 0
    while toy.step():
        most = max(most, toy.scheduler.stats().pages_used)
    toy.check_tokens("a")
    assert most < 12 + 12 + 24
    tables = toy.plans[-1].block_tables
    assert np.count_nonzero(tables[0]) == 13 and np.count_nonzero(tables[1]) <= 4 and np.count_nonzero(tables[2]) <= 5
    toy.submit("b", [*range(30), 1], max_tokens=2, ignore_eos=True)
    toy.drain()
    assert toy.deltas["b"][0].cached_tokens == 28
    toy.check_tokens("b")


@pytest.mark.parametrize("max_tokens", [None, 2**31 - 1])
def test_no_end_of_a_range_ends_the_engine(max_tokens):
    for name, low, high in _RANGES:
        for value in {low, high} if name != "n" else {1}:
            if name == "max_tokens" or (name == "min_tokens" and max_tokens is not None and value > max_tokens):
                continue
            toy = Toy()
            toy.submit("a", range(20), max_tokens=max_tokens, **{name: value})
            toy.submit("b", range(20), max_tokens=3, ignore_eos=True)
            toy.drain()
            assert len(toy.tokens["b"][0]) == 3 and toy.ended.count("a") == 1
