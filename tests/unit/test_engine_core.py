"""The loop with a real scheduler, runner and toy model: overlap changes nothing, failures are told, idle engines wait."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial
from itertools import count, pairwise
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from pagoda.hal.errors import CapacityError, EngineDeadError, PagodaError, RequestError
from pagoda.serving.engine import admission, core, scheduler
from pagoda.serving.engine.core import EngineCore
from pagoda.serving.engine.inprocess_client import Engine, InProcessClient
from pagoda.serving.engine.messages import EngineRequest, FinishReason, RequestDelta, StepDeltas
from pagoda.serving.engine.plan import StepPlan, StepResult
from pagoda.serving.engine.sequence import Request
from patience import eventually, until
from slow_steps import HandBrake, side_by_side, slow_engine
from toy import EOS, ToyModel, dense_greedy, toy_engine, toy_request

PROMPTS = [[5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 8, 25], [90, 4, 6, 31], [7] * 30, [11, 12], list(range(2, 60))]


async def ask(client: InProcessClient, request: EngineRequest) -> list[int]:
    deltas = [delta async for delta in client.generate(request)]
    assert deltas[-1].finished and not any(delta.finished for delta in deltas[:-1])
    return [token for delta in deltas for sequence in delta.sequences for token in sequence.token_ids]


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[InProcessClient]:
    made = await InProcessClient.start(partial(toy_engine, **getattr(request, "param", {})))
    yield made
    await made.close()


@pytest.mark.parametrize("client", [{"overlap": depth} for depth in (1, 2, 3)], indirect=True)
async def test_requests_at_once_give_the_oracles_tokens(client: InProcessClient) -> None:
    answers = await asyncio.gather(*(ask(client, toy_request(str(i), prompt, 12)) for i, prompt in enumerate(PROMPTS)))
    assert list(answers) == [dense_greedy(ToyModel(), prompt, 12) for prompt in PROMPTS]
    stats = await client.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.generation_tokens == 60 and stats.steps > 0 and stats.step_ms >= stats.host_ms > 0


async def test_few_pages_and_a_small_budget_change_nothing() -> None:
    brake = HandBrake()
    client = await InProcessClient.start(partial(slow_engine, partial(toy_engine, num_pages=60, budget=16), brake))
    prompts = [[i + 2, *range(3, 20)] for i in range(8)]
    answers = await side_by_side(client, brake, *(ask(client, toy_request(str(i), prompt, 24)) for i, prompt in enumerate(prompts)))
    assert list(answers) == [dense_greedy(ToyModel(), prompt, 24) for prompt in prompts]
    assert (await client.stats()).preemptions > 0
    await client.close()


async def test_a_repeated_prompt_hits_the_prefix_cache(client: InProcessClient) -> None:
    first = await ask(client, toy_request("a", PROMPTS[4], 6))
    deltas = [delta async for delta in client.generate(toy_request("b", PROMPTS[4], 6))]
    assert deltas[0].cached_tokens >= 48
    assert [token for delta in deltas for sequence in delta.sequences for token in sequence.token_ids] == first
    assert await client.call("reset_prefix_cache") is True
    (third, *_) = [delta async for delta in client.generate(toy_request("c", PROMPTS[4], 6))]
    assert third.cached_tokens == 0


async def test_how_long_a_request_waited_comes_with_its_first_delta(client: InProcessClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves a second for each request that is let in, of which sixteen fit."""
    monkeypatch.setattr(scheduler, "Request", partial(Request, submitted=0.0))
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=partial(next, count(1.0))))
    requests = [toy_request(str(i), [5, 6, 7], 12) for i in range(24)]

    async def queued(request: EngineRequest) -> list[float]:
        return [delta.queued async for delta in client.generate(request)]

    waits = await asyncio.gather(*map(queued, requests))
    assert [wait[0] for wait in waits] == [*range(1, 25)] and not any(any(wait[1:]) for wait in waits)


async def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(client: InProcessClient) -> None:
    warm = {"temperature": 1.2, "top_p": 0.9, "seed": 42}
    alone = await ask(client, toy_request("a", PROMPTS[1], 15, **warm))
    crowd = [toy_request(f"x{i}", PROMPTS[i], 15, temperature=0.8, seed=i) for i in range(4)]
    answers = await asyncio.gather(*(ask(client, request) for request in [*crowd, toy_request("b", PROMPTS[1], 15, **warm)]))
    assert answers[-1] == alone and len(set(alone)) > 3


async def test_bound_and_free_rows_together(client: InProcessClient) -> None:
    plain = dense_greedy(ToyModel(), PROMPTS[0], 10)
    banned = toy_request("ban", PROMPTS[0], 10, bad_words_token_ids=((plain[2], plain[3]), (plain[0],)))
    free, bound = await asyncio.gather(ask(client, toy_request("free", PROMPTS[0], 10)), ask(client, banned))
    assert free == plain and plain[0] not in bound
    assert (plain[2], plain[3]) not in list(pairwise(bound))


async def test_min_tokens_hold_the_end_back(client: InProcessClient) -> None:
    request = toy_request("m", PROMPTS[1], 20, ignore_eos=False, min_tokens=7, logit_bias={EOS: 1e3})
    assert len(await ask(client, request)) == 8
    short = toy_request("s", PROMPTS[1], 20, ignore_eos=False, logit_bias={EOS: 1e3})
    assert await ask(client, short) == [EOS]


async def test_several_sequences(client: InProcessClient) -> None:
    deltas = [delta async for delta in client.generate(toy_request("n", PROMPTS[0], 6, n=3, temperature=1.5, seed=3))]
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for delta in deltas:
        for sequence in delta.sequences:
            tokens[sequence.index] += sequence.token_ids
    assert {len(one) for one in tokens.values()} == {6} and len({tuple(one) for one in tokens.values()}) == 3


async def test_refusals_reach_only_their_request(client: InProcessClient) -> None:
    for request, error, words in [
        (toy_request("a", [3] * 300), (RequestError, CapacityError), "300"),
        (toy_request("b", [3, 97]), RequestError, "97"),
        (toy_request("c", [3], logit_bias={500: 1.0}), RequestError, "500"),
        (toy_request("d", [3], bad_words_token_ids=((),)), RequestError, "empty"),
    ]:
        with pytest.raises(error, match=words):
            await ask(client, request)
    with pytest.raises(RequestError, match="no control call 'dance'"):
        await client.call("dance")
    with pytest.raises(RequestError, match="level"):
        await client.call("sleep", level=9)
    assert await ask(client, toy_request("e", PROMPTS[1])) == dense_greedy(ToyModel(), PROMPTS[1], 8)


async def test_nan_fails_its_request_alone() -> None:
    client = await InProcessClient.start(partial(toy_engine, poison=50))
    good = asyncio.create_task(ask(client, toy_request("good", PROMPTS[0])))
    deltas = [delta async for delta in client.generate(toy_request("bad", [3, 50]))]
    assert deltas[-1].finished and deltas[-1].sequences[0].finish_reason is FinishReason.ERROR and "NaN" in str(deltas[-1].error)
    assert await good == dense_greedy(ToyModel(), PROMPTS[0], 8)
    await client.close()


@pytest.fixture
async def slow_client() -> AsyncIterator[InProcessClient]:
    """Its requests run while a test does something: tokens come slowly."""
    made = await InProcessClient.start(partial(slow_engine, toy_engine, HandBrake()))
    yield made
    await made.close()


async def test_leaving_a_stream_aborts_and_frees(slow_client: InProcessClient) -> None:
    client = slow_client
    stream = client.generate(toy_request("long", PROMPTS[0], 200))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    other = client.generate(toy_request("other", PROMPTS[1], 200))
    await anext(other)
    await client.abort(["other", "unknown"])
    last = [delta async for delta in other][-1]
    assert last.finished and last.sequences[0].finish_reason is FinishReason.ABORT
    while (await client.stats()).pages_used:
        await asyncio.sleep(0.01)


async def test_sleep_frees_the_pool_and_wake_serves_again(client: InProcessClient) -> None:
    before = await ask(client, toy_request("a", PROMPTS[0]))
    (held,) = await client.call("memory")
    await client.call("sleep")
    assert (await client.call("memory"))[0]["kv"] == 0 and await client.call("is_sleeping") is True
    with pytest.raises(RequestError, match="wake"):
        await ask(client, toy_request("b", PROMPTS[0]))
    await client.call("wake")
    assert (await client.call("memory"))[0]["kv"] == held["kv"] > 0
    assert await ask(client, toy_request("c", PROMPTS[0])) == before


async def test_sleep_waits_for_nobody(slow_client: InProcessClient) -> None:
    stream = slow_client.generate(toy_request("long", PROMPTS[0], 200))
    await anext(stream)
    with pytest.raises(RequestError, match="unfinished"):
        await slow_client.call("sleep")
    await stream.aclose()  # type: ignore[attr-defined]


class _Commands(SimpleQueue):  # type: ignore[type-arg]
    """Knows for how long somebody waits for it at this moment, None: as long as it takes."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.waits.append(timeout)
        try:
            return super().get(block, timeout)
        finally:
            self.waits.pop()


async def test_an_idle_engine_takes_no_processor_time() -> None:
    commands = _Commands()

    def watched(sink: Any) -> Engine:
        engine = toy_engine(sink)
        engine.core._commands = commands
        return engine

    client = await InProcessClient.start(watched)
    await ask(client, toy_request("a", PROMPTS[0]))
    await eventually(lambda: commands.waits == [None])
    await client.close()


async def test_a_failing_step_ends_the_engine_and_everybody_hears_why() -> None:
    client = await InProcessClient.start(_broken_engine)
    streams = [client.generate(toy_request(str(i), PROMPTS[i], 50)) for i in range(3)]
    outcomes = await asyncio.gather(*(_drain(stream) for stream in streams), return_exceptions=True)
    assert all(isinstance(outcome, EngineDeadError) and "the lights went out" in str(outcome) for outcome in outcomes), outcomes
    with pytest.raises(EngineDeadError, match="the lights went out"):
        await client.health()
    with pytest.raises(EngineDeadError, match="the lights went out"):
        await _drain(client.generate(toy_request("late", [3])))
    with pytest.raises(EngineDeadError, match="the lights went out"):
        await client.call("stats")
    await client.close()


async def _drain(stream: AsyncIterator[RequestDelta]) -> list[RequestDelta]:
    return [delta async for delta in stream]


def _broken_engine(sink: Any) -> Engine:
    engine = toy_engine(sink)
    submit = engine.executor.submit

    def failing(plan: StepPlan) -> Future[StepResult]:
        if plan.step < 4:
            return submit(plan)
        future: Future[StepResult] = Future()
        future.set_exception(ValueError("the lights went out"))
        return future

    engine.executor.submit = failing  # type: ignore[method-assign]
    return engine


class _Recorder:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.ends: list[EngineDeadError] = []
        self.refused: list[tuple[str, PagodaError]] = []
        self.tokens: dict[str, list[int]] = {}

    def deltas(self, deltas: StepDeltas) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(token for part in delta.sequences for token in part.token_ids)

    def rejected(self, request_id: str, error: PagodaError) -> None:
        self.refused.append((request_id, error))

    def dead(self, error: EngineDeadError) -> None:
        self.ends.append(error)


def test_steps_overlap_up_to_the_depth() -> None:
    sink = _Recorder()
    engine = toy_engine(sink, overlap=3)
    open_steps, most = 0, 0
    submit = engine.executor.submit

    def counting(plan: StepPlan) -> Future[StepResult]:
        nonlocal open_steps, most
        open_steps += 1
        most = max(most, open_steps)
        answer: Future[StepResult] = Future()
        inner = submit(plan)
        original = answer.result

        def result(timeout: float | None = None) -> StepResult:
            nonlocal open_steps
            open_steps -= 1
            return original(timeout)

        answer.result = result  # type: ignore[method-assign]
        inner.add_done_callback(lambda done: answer.set_result(done.result()))
        return answer

    engine.executor.submit = counting  # type: ignore[method-assign]
    engine.core.submit(toy_request("a", PROMPTS[0], 20))
    thread = threading.Thread(target=engine.core.run, daemon=True)
    thread.start()
    try:
        until(lambda: len(sink.tokens.get("a", ())) == 20)
    finally:
        engine.core.stop()
        thread.join(60)
        engine.executor.stop()
    assert most == 3 and sink.tokens["a"] == dense_greedy(ToyModel(), PROMPTS[0], 20)


class _ByHand:
    """The loop in the test's own thread and by a clock that the test moves: the ranks take a tenth of a second for a step, one after the
    other, and compute what they compute."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.begun = 0.0, 0.0
        self.plans: list[StepPlan] = []
        self._core, self._submit = engine.core, engine.executor.submit
        self._in_flight: deque[tuple[Future[StepResult], Future[StepResult]]] = deque()
        engine.executor.submit = self.submit  # type: ignore[method-assign]
        monkeypatch.setattr(core, "time", self)

    def perf_counter(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        self.begun = self.begun if self._in_flight else self.now
        self.plans.append(plan)
        self._in_flight.append((Future(), self._submit(plan)))
        return self._in_flight[-1][0]

    def settle(self) -> float | None:
        """Let the loop do what is to be done at this moment. Returns how long it waits then if nothing happens, None: for ever."""
        wait: float | None = 0
        while wait == 0:
            self._core._take_commands(0)
            wait = self._core._step()
        return wait

    def end_step(self) -> None:
        """Go on until the step that runs has ended, and the loop has seen to that."""
        end = self.begun + 0.1
        while (wait := self.settle()) is not None and self.now + wait < end:
            self.now += wait
        self.now = self.begun = end
        answer, computed = self._in_flight.popleft()
        answer.set_result(computed.result())
        self.settle()


def test_who_comes_while_a_step_runs_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps in flight at most: the second is planned when the first is about to end, and not before."""
    sink = _Recorder()
    engine = toy_engine(sink, overlap=2)
    loop = _ByHand(engine, monkeypatch)
    try:
        engine.core.submit(toy_request("a", PROMPTS[0], 40))
        for _ in range(24):  # until the loop has learnt what steps take
            loop.settle()
            loop.end_step()
        before = len(loop.plans)  # one has just begun
        loop.now += 0.08
        wait = loop.settle()
        assert len(loop.plans) == before and wait is not None and 0 < wait < 0.02
        engine.core.submit(toy_request("b", PROMPTS[1], 4))
        loop.settle()
        assert len(loop.plans) == before
        loop.now += wait
        loop.settle()
        assert len(loop.plans) == before + 1 and loop.plans[before].admissions
        while len(sink.tokens.get("b", ())) < 4:
            loop.end_step()
    finally:
        engine.executor.stop()
    assert sink.tokens["b"] == dense_greedy(ToyModel(), PROMPTS[1], 4)


def test_what_comes_after_the_end_is_refused_at_once() -> None:
    sink = _Recorder()
    engine = toy_engine(sink)
    loop: EngineCore = engine.core
    waiting = loop.call("stats", {})
    loop.stop()
    loop.submit(toy_request("queued", [3]))
    loop.run()
    loop.submit(toy_request("late", [3]))
    assert waiting.result().running == 0
    assert [name for name, error in sink.refused if isinstance(error, EngineDeadError)] == ["queued", "late"]
    with pytest.raises(EngineDeadError, match="stopped"):
        loop.call("stats", {}).result()
    with pytest.raises(EngineDeadError):
        loop.health()
    engine.executor.stop()
    with pytest.raises(EngineDeadError, match="not running"):
        engine.executor.collective("memory")


async def test_a_start_that_ends_by_an_empty_iterator_is_told() -> None:
    def empty(sink: object) -> NoReturn:
        raise StopIteration

    with pytest.raises(RuntimeError, match="ended the engine's start"):
        await asyncio.wait_for(InProcessClient.start(empty), 60)
