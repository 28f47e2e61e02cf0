"""When the loop plans: a step that takes little is followed at once and its device never waits; who comes while a slow one runs is in
the next. By a simulated clock, so that nothing here depends on the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pagoda.serving.engine import pace
from pagoda.serving.engine.plan import RunnerFacts
from scheduler_toy import toy_facts
from timed_loop import TimedLoop

CONFIG = {"max_num_seqs": 8, "max_num_batched_tokens": 300}
PROMPT = [3, 4, 5]


def facts(**given: object) -> RunnerFacts:
    return replace(toy_facts(num_pages=2000, max_model_len=400), in_calls=True, **given)  # type: ignore[arg-type]


def decoding(loop: TimedLoop, steps: int = 200) -> TimedLoop:
    """Two requests that decode."""
    loop.ask("a", PROMPT, steps)
    loop.ask("b", PROMPT, steps)
    loop.run()
    assert len(loop.came["a"]) == len(loop.came["b"]) == steps
    return loop


def followed_at_once(loop: TimedLoop) -> bool:
    """Whether each step was submitted as soon as fewer than `overlap` were in flight: when the one before had just begun."""
    return all(asked <= began + loop.host_ms / 1000 + 1e-9 for asked, began in zip(loop.submitted[2:-1], loop.began[1:], strict=False))


@pytest.mark.parametrize("step_ms", [0.3, 0.7, 2.0, 4.0, pace.SLOW_MS - 0.1])
@pytest.mark.parametrize("host_ms", [0.0, 0.2])
def test_a_step_shorter_than_the_limit_is_followed_at_once(step_ms: float, host_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = decoding(TimedLoop(facts(), (step_ms, 0.0, 0.0), host_ms, **CONFIG).clock(monkeypatch))
    assert followed_at_once(loop)
    assert loop.idle <= 3 * host_ms / 1000 + 1e-9  # the first two, and the last


@pytest.mark.parametrize("step_ms", [10.0, 40.0, 300.0])
def test_devices_that_work_beside_the_host_are_never_kept_waiting(step_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = decoding(TimedLoop(replace(facts(), in_calls=False), (step_ms, 0.1, 0.1), **CONFIG).clock(monkeypatch))
    assert followed_at_once(loop) and loop.idle == pytest.approx(0.0)


@pytest.mark.parametrize("overlap", [2, 3])
@pytest.mark.parametrize("step_ms", [pace.SLOW_MS + 1, 20.0, 40.0, 300.0])
def test_a_slow_step_is_followed_shortly_before_its_end(step_ms: float, overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = decoding(TimedLoop(facts(overlap=overlap), (step_ms, 0.0, 0.0), 0.2, **CONFIG).clock(monkeypatch))
    leads = loop.leads(100)[:-overlap]
    spare = (pace.SPARE_MS + pace.SPARE * step_ms) / 1000
    if overlap == 2:
        assert all(spare - 1e-9 <= lead <= spare + 0.001 for lead in leads)
    assert min(leads) > 0
    assert sum(began - ended for began, ended in zip(loop.began[101:-1], loop.ends[100:], strict=False)) == pytest.approx(0.0)


def test_without_overlap_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = decoding(TimedLoop(facts(overlap=1), (40.0, 0.0, 0.0), 0.5, **CONFIG).clock(monkeypatch))
    assert all(asked == pytest.approx(ended + 0.0005) for asked, ended in zip(loop.submitted[1:], loop.ends, strict=False))


def test_who_comes_while_a_slow_step_runs_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {}
    for in_calls in (True, False):
        loop = TimedLoop(replace(facts(), in_calls=in_calls), (40.0, 1.0, 0.1), **CONFIG).clock(monkeypatch)
        loop.ask("a", PROMPT, 120)
        loop.run({2.9: ("new", PROMPT, 4)})
        first[in_calls] = loop.came["new"][0]
    assert first[True] == pytest.approx(first[False] - 0.041)  # a whole step sooner


def test_nobody_can_come_where_all_slots_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(facts(), (40.0, 0.0, 0.0), **{**CONFIG, "max_num_seqs": 2}).clock(monkeypatch)
    assert followed_at_once(decoding(loop))


def test_bursts_are_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = decoding(TimedLoop(facts(burst_steps=4, burst_rows=4), (1.2, 0.0, 0.0), **CONFIG).clock(monkeypatch))
    assert sum(plan.runs is not None for plan in loop.plans) > 40
    assert followed_at_once(loop) and loop.idle == pytest.approx(0.0)


@pytest.mark.parametrize("noise", [0.1, 0.5])
@pytest.mark.parametrize("step_ms", [9.0, 40.0])
def test_steps_of_uneven_length_keep_their_device_busy(step_ms: float, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps end before what was expected, planning comes sooner: a host that needs 0.5 ms costs less than half a percent."""
    loop = decoding(TimedLoop(facts(), (step_ms, 0.0, 0.0), 0.5, noise, **CONFIG).clock(monkeypatch), 390)
    assert loop.idle < 0.005 * loop.now


def test_steps_that_become_fast_are_followed_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TimedLoop(facts(), (60.0, 0.0, 0.0), 0.2, **CONFIG).clock(monkeypatch)
    loop.ask("a", PROMPT, 390)
    loop.run(until=6.0)
    loop.costs, before = (1.0, 0.0, 0.0), len(loop.plans)
    loop.run()
    waits = [began - ended for began, ended in zip(loop.began[before + 2 :], loop.ends[before + 1 :], strict=False)]
    assert max(waits) <= 0.0002 + 1e-9 and not any(wait > 1e-9 for wait in waits[24:-2])
