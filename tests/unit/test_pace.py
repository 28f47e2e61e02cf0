"""What steps took decides who shares one: prompts one after the other, long ones in chunks, decodes back for a while, nobody for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pagoda.models.media import MediaFacts, MediaItem
from pagoda.serving.engine import pace
from pagoda.serving.engine.pace import Due, Pace, work_of
from pagoda.serving.engine.plan import StepPlan
from scheduler_toy import KnowingDrafter, Toy, toy_facts

FACTS = {"num_pages": 2000, "max_model_len": 400}
CONFIG = {"max_num_seqs": 16, "max_num_batched_tokens": 300, "enable_prefix_caching": False}
DEAR, CHEAP = (2.0, 2.0, 1.0), (10.0, 0.02, 0.02)
"""A device that arithmetic limits, and one on which rows are all but free."""
FLAT = (100.0, 1.0, 1.0)
"""A slow one on which they are."""


def lived(costs: tuple[float, float, float], **facts: object) -> Toy:
    """A toy whose steps have been seen for a while."""
    toy = Toy(replace(toy_facts(overlap=1, **FACTS), **facts), costs=costs, **CONFIG)
    for number in range(80):
        toy.submit(f"past{number}", range(2, 6 + 17 * number % 40), max_tokens=4 + number % 7, ignore_eos=True)
        toy.step()
    toy.drain()
    toy.plans.clear()
    return toy


def prompts_of(plan: StepPlan) -> list[int]:
    return plan.lengths[plan.lengths > 1].tolist()


def test_costs_are_learnt() -> None:
    toy = lived(DEAR)
    toy.submit("a", range(2, 22), max_tokens=2)
    plan = toy.plan()
    assert plan is not None and toy.scheduler.expected_ms(plan) == pytest.approx(22.0, rel=0.05)


def test_nothing_is_known_at_first() -> None:
    toy = Toy(toy_facts(overlap=1, **FACTS), **CONFIG)
    for number in range(4):
        toy.submit(str(number), range(2, 42), max_tokens=2)
    plan = toy.plan()
    assert plan is not None and prompts_of(plan) == [40] * 4 and toy.scheduler.expected_ms(plan) == 0.0


def test_prompts_come_one_after_the_other_where_they_take_long() -> None:
    for costs, steps in ((DEAR, [[40], [40], [40]]), (CHEAP, [[40, 40, 40]])):
        toy = lived(costs)
        for number in range(3):
            toy.submit(str(number), range(2, 42), max_tokens=9, ignore_eos=True)
        toy.drain()
        assert [prompts_of(plan) for plan in toy.plans if prompts_of(plan)] == steps


def test_a_long_prompt_leaves_room_for_a_short_one() -> None:
    toy = lived(DEAR)
    toy.submit("short", range(2, 12), max_tokens=30, ignore_eos=True)
    toy.step()
    toy.submit("long", [2 + k % 40 for k in range(390)], max_tokens=2)
    toy.step()
    toy.submit("late", range(2, 32), max_tokens=2)
    toy.drain()
    longest = max(int(plan.num_tokens) for plan in toy.plans)
    assert longest <= pace.CHUNK_MS / DEAR[2] * 1.05
    assert toy.ended.index("late") < toy.ended.index("long")
    for name in ("short", "long", "late"):
        toy.check_tokens(name)


def test_an_image_that_a_step_must_hold_whole_is_not_waited_for_for_ever() -> None:
    toy = lived(DEAR, media=MediaFacts(("image",), 8, whole=True), media_rows=400)
    toy.submit("other", range(2, 12), max_tokens=60, ignore_eos=True)
    toy.step()
    image = MediaItem("image", b"x", 4, 250)
    toy.submit("a", [2 + k % 40 for k in range(270)], max_tokens=2, request={"media": (image,)})
    toy.drain()
    assert image.length > pace.CHUNK_MS / DEAR[2] and "a" in toy.ended


def test_decodes_stand_back_for_prompts_and_not_for_long() -> None:
    gaps = {}
    for costs in (DEAR, CHEAP):
        toy = lived(costs)
        for number in range(6):
            toy.submit(f"old{number}", [3, 4, 5], max_tokens=60, ignore_eos=True)
        for _ in range(8):
            toy.step()
        began, old = len(toy.plans), toy.plans[-1].slots[0]
        for number in range(9):
            toy.submit(f"new{number}", range(2, 42), max_tokens=2, ignore_eos=True)
        toy.drain()
        without, longest = 0.0, 0.0
        for plan in toy.plans[began : began + 20]:
            without = 0.0 if old in plan.slots else without + toy.scheduler.expected_ms(plan)
            longest = max(longest, without)
        gaps[costs] = longest
    assert gaps[CHEAP] == 0.0 and 40.0 < gaps[DEAR] <= pace.HOLD_MS


def test_a_step_that_waited_for_something_else_counts_little() -> None:
    toy = lived(DEAR)
    toy.submit("a", range(2, 42), max_tokens=30, ignore_eos=True)
    toy.step()
    toy.scheduler.note_pace(toy.plans[0], 10_000.0)
    toy.drain()
    toy.submit("b", range(2, 42), max_tokens=2)
    plan = toy.plan()
    assert plan is not None and toy.scheduler.expected_ms(plan) < 3 * 42.0


def test_a_fit_is_never_negative() -> None:
    made = Pace()
    toy = Toy(toy_facts(overlap=1, **FACTS), **CONFIG)
    toy.submit("a", range(2, 42), max_tokens=20, ignore_eos=True)
    toy.drain()
    for number, plan in enumerate(toy.plans[:16]):
        made.note(plan, 100.0 / (1 + number))
        assert made.expected_ms(plan) >= 0.0


@pytest.mark.parametrize("costs", [CHEAP, FLAT, (0.7, 0.01, 0.002), (8.0, 0.01, 0.02)])
def test_plans_are_as_ever_where_rows_are_all_but_free(costs: tuple[float, float, float]) -> None:
    """Whatever has been learnt there, steps are filled as far as the budget lasts and nobody stands back."""
    traces = []
    for known in (costs, None):
        toy = Toy(toy_facts(overlap=2, **FACTS), costs=known, **CONFIG)
        for number in range(60):
            prompt = [2 + (7 * number + place) % 40 for place in range(10 + 61 * number % 300)]
            toy.submit(str(number), prompt, max_tokens=3 + number % 20, ignore_eos=True)
            for _ in range(number % 4):
                toy.step()
        toy.drain()
        traces.append([(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist()) for plan in toy.plans])
    assert traces[0] == traces[1]


def test_what_cannot_be_told_apart_is_put_down_to_the_step() -> None:
    """Steps that are all alike say nothing of rows: that they are dear is not taken for granted."""
    toy = Toy(toy_facts(overlap=1, **FACTS), **CONFIG)
    toy.submit("a", range(2, 42), max_tokens=200, ignore_eos=True)
    made = Pace()
    for _ in range(100):
        toy.step()
        made.note(toy.plans[-1], 40.0)
    assert made.expected_ms(toy.plans[-1]) == pytest.approx(40.0, rel=0.01)
    assert not made.dear and not made.prompt_tokens and not made.chunk_tokens(True) and not made.hold_ms(8, 40, 0.0)


def test_what_was_learnt_of_prompts_outlives_many_decodes() -> None:
    toy = lived(DEAR)
    for number in range(3):
        toy.submit(f"long{number}", [3, 4, 5], max_tokens=350, ignore_eos=True)
    for _ in range(340):
        toy.step()
    toy.submit("b", range(2, 42), max_tokens=2)
    plan = toy.plan()
    assert plan is not None and prompts_of(plan) == [40] and toy.scheduler.expected_ms(plan) == pytest.approx(42.0, rel=0.2)


def test_drafts_are_decodes_with_further_tokens() -> None:
    toy = Toy(toy_facts(overlap=1, **FACTS), drafter=KnowingDrafter(2), **CONFIG)
    toy.submit("a", [3, 4, 5] * 4, max_tokens=20, ignore_eos=True)
    toy.drain()
    drafted = [plan for plan in toy.plans if plan.drafts is not None and plan.drafts.max() >= 0]
    assert drafted
    for plan in drafted:
        assert work_of(plan) == (1, plan.num_tokens - 1)
    assert work_of(toy.plans[0]) == (0, 12)


def test_a_burst_is_expected_to_take_all_its_steps() -> None:
    toy = Toy(toy_facts(overlap=1, burst=4, **FACTS), **CONFIG)
    toy.submit("a", [3, 4, 5], max_tokens=300, ignore_eos=True)
    for _ in range(40):
        toy.step()
        toy.scheduler.note_pace(toy.plans[-1], 1.0)
    bursts = [plan for plan in toy.plans if plan.runs is not None]
    assert bursts and toy.scheduler.expected_ms(bursts[-1]) == pytest.approx(bursts[-1].num_steps, rel=0.05)


@pytest.mark.parametrize("step_ms", [0.0, 0.7, 2.0, 4.0, pace.SLOW_MS - 0.01])
def test_a_step_that_takes_little_is_followed_at_once(step_ms: float) -> None:
    assert Due().left_s(0.0, step_ms, 0.0) == 0.0


@pytest.mark.parametrize("step_ms", [pace.SLOW_MS, 20.0, 300.0])
def test_a_slow_one_shortly_before_its_end(step_ms: float) -> None:
    due = Due()
    left = 1e3 * due.left_s(0.0, step_ms, 0.0)
    assert step_ms - left == pytest.approx(pace.SPARE_MS + pace.SPARE * step_ms)
    assert 1e3 * due.left_s(0.001, step_ms, 0.0) == pytest.approx(left - 1.0)
    assert 1e3 * due.left_s(0.0, step_ms, 0.0005) == pytest.approx(left - 1.0)
    assert due.left_s(1.0, step_ms, 0.0) == 0.0


def test_who_came_late_comes_sooner_next_time() -> None:
    due = Due()
    first = due.left_s(0.0, 100.0, 0.0)
    for _ in range(3):
        due.left_s(0.0, 100.0, 0.0)
        due.planned(late=True)
    sooner = due.left_s(0.0, 100.0, 0.0)
    assert sooner == pytest.approx(first - 0.1 * 7 * pace.SPARE)
    for _ in range(20):
        due.left_s(0.0, 100.0, 0.0)
        due.planned(late=True)
    assert due.left_s(0.0, 100.0, 0.0) == pytest.approx(1e-3 * (100 * (1 - pace.MOST_SPARE) - pace.SPARE_MS))
    for _ in range(200):
        due.left_s(0.0, 100.0, 0.0)
        due.planned(late=False)
    assert due.left_s(0.0, 100.0, 0.0) == pytest.approx(first)


def test_steps_that_were_planned_at_once_say_nothing_of_the_spare_time() -> None:
    due = Due()
    first = due.left_s(0.0, 100.0, 0.0)
    due.planned(late=False)
    for _ in range(50):
        assert due.left_s(0.0, 1.0, 0.0) == 0.0
        due.planned(late=True)
    assert due.left_s(0.0, 100.0, 0.0) == first


def test_a_fast_device_that_compiles_once_is_still_fast() -> None:
    toy = Toy(toy_facts(overlap=1, **FACTS), **CONFIG)
    toy.submit("a", range(2, 42), max_tokens=200, ignore_eos=True)
    for number in range(100):
        toy.step()
        toy.scheduler.note_pace(toy.plans[-1], 10_000.0 if number in (0, 1, 40) else 1.0)
        assert toy.scheduler.expected_ms(toy.plans[-1]) < pace.SLOW_MS
