"""The engine's spreads and counters against what a known run of requests did."""

from __future__ import annotations

import numpy as np
import pytest
from pagoda.serving.engine import blocks
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.histograms import BOUNDS, Histogram, Histograms
from pagoda.serving.engine.sequence import State
from scheduler_toy import Toy, toy_facts, toy_store


def test_values_fall_under_the_first_bound_that_is_not_below_them() -> None:
    one, many = Histogram((0, 1, 5)), Histogram((0, 1, 5))
    values = [0, 0.5, 1, 1.5, 5, 5.1, 900]
    for value in values:
        one.add(value)
    many.extend(np.array(values))
    assert one.told() == many.told() == ((1, 2, 2, 2), sum(values))


def test_pages_tell_their_age_when_others_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(blocks.time, "monotonic", lambda: now[0])
    histograms = Histograms()
    pool = BlockPool(3, histograms)
    first = pool.allocate(1)
    pool.insert(b"prefix", int(first[0]))
    pool.release(first)
    now[0] = 20.0
    pool.share(first)
    pool.found(first)
    pool.release(first)
    now[0] = 50.0
    pool.release(pool.allocate(1))
    told = histograms.told()
    assert sum(told["page_gap"][0]) == 1 and told["page_gap"][1] == 20.0
    assert not sum(told["page_lifetime"][0]), "a free page was taken first"
    pool.allocate(2)
    told = histograms.told()
    assert told["page_lifetime"][1] == 50.0 and told["page_idle"][1] == 30.0
    assert told["page_idle"][0][BOUNDS["page_idle"].index(30.0)] == 1


@pytest.mark.parametrize("burst", [1, 4])
def test_tokens_of_steps_and_preemptions_of_requests(burst: int) -> None:
    toy = Toy(toy_facts(num_pages=14, burst=burst))
    for name in "abcd":
        toy.submit(name, range(ord(name) % 7, ord(name) % 7 + 9), max_tokens=24, ignore_eos=True)
    toy.drain()
    stats = toy.scheduler.stats()
    steps, tokens = stats.histograms["iteration_tokens"]
    assert sum(steps) == stats.steps
    assert tokens == sum(int(plan.lengths.sum() if plan.runs is None else plan.runs.sum()) for plan in toy.plans)
    requests, preemptions = stats.histograms["request_preemptions"]
    assert sum(requests) == 4 and preemptions == stats.preemptions > 0


def test_who_waits_for_something_other_than_room_is_deferred() -> None:
    toy = Toy(max_num_seqs=1)
    toy.submit("runs", [1, 2, 3], max_tokens=8, ignore_eos=True, n=2)
    toy.submit("waits", [4, 5, 6], max_tokens=2)
    toy.submit("gated", [7, 8, 9], gates=[State.WAITING_GRAMMAR], max_tokens=2)
    stats = toy.scheduler.stats()
    assert (stats.running, stats.waiting, stats.deferred) == (0, 4, 2)
    toy.step()
    assert toy.scheduler.stats().running == 1
    toy.scheduler.open_gate("gated", State.WAITING_GRAMMAR)
    toy.drain()
    assert toy.scheduler.stats().deferred == 0


def test_prompt_tokens_are_found_in_the_pool_or_beside_it_or_computed() -> None:
    toy = Toy(toy_facts(num_pages=14), store=lambda read, write: toy_store(64, read, write))
    prompts = {"a": range(20), "b": range(20), "c": range(30, 49), "d": range(20)}
    for name, prompt in prompts.items():
        toy.submit(name, prompt, max_tokens=2, ignore_eos=True)
        toy.drain()
        if name == "b":
            assert toy.scheduler.reset_prefix_cache()
    stats = toy.scheduler.stats()
    assert stats.computed_tokens + stats.prefix_hits + stats.external_hits == sum(map(len, prompts.values()))
    assert stats.prefix_hits and stats.external_hits and stats.computed_tokens >= 39


def test_names_of_adapters_that_requests_use_and_wait_with() -> None:
    toy = Toy(toy_facts(adapter_slots=1))
    for name in "xy":
        toy.submit(name, [1, 2, 3], request={"adapter": name}, max_tokens=4, ignore_eos=True, extra={"adapter": name})
    toy.plan()
    stats = toy.scheduler.stats()
    assert (stats.adapters_running, stats.adapters_waiting, stats.adapter_slots) == (("x",), ("y",), 1)
    toy.drain()
    assert toy.scheduler.stats().adapters_running == ()
