"""What steps took decides who shares one: prompts one after the other, long ones in chunks, decodes back for a while, nobody for ever."""

from __future__ import annotations

import pytest
from pagoda.serving.engine import pace
from pagoda.serving.engine.pace import Pace
from pagoda.serving.engine.plan import StepPlan
from scheduler_toy import Toy, toy_facts

FACTS = {"num_pages": 2000, "max_model_len": 400}
CONFIG = {"max_num_seqs": 16, "max_num_batched_tokens": 300, "enable_prefix_caching": False}
DEAR, CHEAP = (2.0, 2.0, 1.0), (10.0, 0.02, 0.02)
"""A device that arithmetic limits, and one on which rows are all but free."""


def lived(costs: tuple[float, float, float]) -> Toy:
    """A toy whose steps have been seen for a while."""
    toy = Toy(toy_facts(overlap=1, **FACTS), costs=costs, **CONFIG)
    for number, prompt in enumerate((5, 9, 17, 30, 4, 60)):
        toy.submit(f"past{number}", range(2, 2 + prompt % 40), max_tokens=4 + number, ignore_eos=True)
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
