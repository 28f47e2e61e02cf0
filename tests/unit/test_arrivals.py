"""Requests that come at once: the first step begins before all are let in, the next is planned while it runs, and nothing is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest
from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine import core as core_module
from pagoda.serving.engine.core import EngineCore
from pagoda.serving.engine.executors.inprocess import InProcessExecutor
from pagoda.serving.engine.messages import StepDeltas
from pagoda.serving.engine.plan import StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from toy import ToyModel, dense_greedy, toy_request, toy_runner

BUDGET, PROMPT, COUNT = 64, 16, 40


class Held(InProcessExecutor):
    """Answers of the toy's steps, held back until they are let go; `plans`, with the commands that waited at each."""

    def __init__(self) -> None:
        super().__init__(partial(toy_runner, max_num_seqs=COUNT))
        self.plans: list[tuple[StepPlan, int]] = []
        self.asked = threading.Semaphore(0)
        self.held: list[tuple[Future[StepResult], Future[StepResult]]] = []
        self.core: EngineCore | None = None
        self.holds, self.lock = True, threading.Lock()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        assert self.core is not None
        real, late = super().submit(plan), Future[StepResult]()
        with self.lock:
            self.plans.append((plan, self.core._commands.qsize()))
            self.asked.release()
            if not self.holds:
                return real
            self.held.append((real, late))
            return late

    def let_go(self) -> None:
        with self.lock:
            self.holds = False
        while self.held:
            real, late = self.held.pop(0)
            late.set_result(real.result())


class Heard:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended = 0
        self.error: EngineDeadError | None = None
        self.over = threading.Event()

    def deltas(self, deltas: StepDeltas) -> None:
        for name, token in zip(deltas.request_ids, deltas.token_ids):
            self.tokens.setdefault(name, []).append(token)
        for delta in deltas.others:
            for part in delta.sequences:
                self.tokens.setdefault(delta.request_id, []).extend(part.token_ids)
            self.ended += delta.finished
        if self.ended == COUNT:
            self.over.set()

    def rejected(self, request_id: str, error: Exception) -> None:
        raise AssertionError(error)

    def dead(self, error: EngineDeadError) -> None:
        self.error = error
        self.over.set()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[EngineCore, Held, Heard, threading.Thread]]:
    """An engine with all requests asked for before its loop begins."""
    executor, sink = Held(), Heard()
    facts = executor.start()
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=COUNT, max_num_batched_tokens=BUDGET), facts)
    core = executor.core = EngineCore(scheduler, executor, facts, sink)  # type: ignore[arg-type]
    for number in range(COUNT):
        core.submit(toy_request(str(number), prompt_of(number), 3))
    thread = threading.Thread(target=_run, args=(core,), daemon=True)
    yield core, executor, sink, thread
    executor.let_go()
    core.stop()
    if thread.ident is not None:
        thread.join()
    executor.stop()


def _run(core: EngineCore) -> None:
    with contextlib.suppress(EngineDeadError):
        core.run()


def _until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    return holds()


def prompt_of(number: int) -> list[int]:
    return [2 + (number * 7 + place * (1 + number % 5)) % 90 for place in range(PROMPT)]


Made = tuple[EngineCore, Held, Heard, threading.Thread]


def test_steps_begin_before_all_requests_are_let_in(engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "EAGER_S", 1e9)
    core, executor, sink, thread = engine
    thread.start()
    assert executor.asked.acquire(timeout=30) and executor.asked.acquire(timeout=30)
    (first, left), (second, still) = executor.plans
    per_step = BUDGET // PROMPT
    assert (first.num_rows, left) == (per_step, COUNT - per_step)
    assert (second.step, second.num_tokens) == (1, BUDGET) and still < left, "planned while the first one runs, which has not answered"
    assert _until(lambda: core._commands.qsize() == 0), "all others are let in while two steps run"
    executor.let_go()
    assert sink.over.wait(30) and sink.error is None
    model = ToyModel()
    assert sink.tokens == {str(number): dense_greedy(model, prompt_of(number), 3) for number in range(COUNT)}


def test_an_idle_device_does_not_wait_for_a_full_step(engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "EAGER_S", 0.0)
    _, executor, sink, thread = engine
    thread.start()
    assert executor.asked.acquire(timeout=30)
    first, left = executor.plans[0]
    assert first.num_rows == 1 and left == COUNT - 1
    executor.let_go()
    assert sink.over.wait(30) and sink.ended == COUNT


def test_the_loop_stops_and_fails_while_it_listens(engine: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told while a step runs is done at once, not behind it."""
    monkeypatch.setattr(core_module, "EAGER_S", 0.0)
    core, executor, sink, thread = engine
    while not core._commands.empty():
        core._commands.get()
    core.submit(toy_request("only", [5, 6, 7], 3))
    thread.start()
    assert executor.asked.acquire(timeout=30)
    assert core.call("stats", {}).result(timeout=30).running == 1
    core.rank_failed(EngineDeadError("rank 0 has gone"))
    assert sink.over.wait(30) and sink.error is not None and "rank 0 has gone" in str(sink.error)
