"""The engine loop: requests in, plans to the executor, results to the scheduler, deltas out. One thread owns the scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, Protocol

from pagoda.hal.errors import EngineDeadError, PagodaError, RequestError
from pagoda.serving.engine.adapter_desk import AdapterDesk
from pagoda.serving.engine.captures import CaptureRule
from pagoda.serving.engine.executor import Executor
from pagoda.serving.engine.grammar import Compiler, Grammar
from pagoda.serving.engine.messages import EngineFacts, EngineRequest, EngineStats, StepDeltas
from pagoda.serving.engine.pace import Due
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.scheduler import Scheduler
from pagoda.serving.engine.sequence import State
from pagoda.serving.engine.structured import StructuredOutputsParams

COMPILING = 4
"""Grammars that are compiled at a time: those that take long do not hold up the next."""


class Command(NamedTuple):
    """Something asked of the loop: what to do between steps, and how to answer when the loop has ended."""

    run: Callable[[], None]
    refuse: Callable[[EngineDeadError], None]


EAGER_S = 0.002
"""While the ranks have nothing to do, requests are taken for no longer than this before a step begins with those that are there."""

_SAME = (
    "max_model_len", "num_pages", "vocab_size", "device", "kernels", "adapter_slots", "load_seconds", "pooling", "encoder", "logprobs",
    "embeds_width",
)  # fmt: skip
"""Facts that a frontend is told as the ranks say them."""

NOTHING = Command(lambda: None, lambda _: None)
"""Makes the loop look at what has happened."""


@dataclass
class Flight:
    """A step that the ranks were given, when, how long it should take them, and when it had ended, 0.0 before."""

    plan: StepPlan
    future: Future[StepResult]
    began: float
    expected_ms: float
    ended: float = 0.0


class Sink(Protocol):
    """Where the loop's answers go; called in the loop's thread, must not block."""

    def deltas(self, deltas: StepDeltas) -> None:
        """New tokens and ends of requests."""
        ...

    def rejected(self, request_id: str, error: PagodaError) -> None:
        """A request was refused at submit; nothing else follows for it."""
        ...

    def dead(self, error: EngineDeadError) -> None:
        """The loop failed; nothing follows for anybody."""
        ...


class EngineCore:
    """One replica. `run` is the loop; the other methods may be called from any thread.

    Args:
        scheduler: owned by the loop from now on.
        executor: started.
        facts: what its ranks said.
        sink: where answers go.
        max_cpu_adapters: see `AdapterDesk`.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, facts: RunnerFacts, sink: Sink, max_cpu_adapters: int | None = None
    ) -> None:
        self._scheduler, self._executor, self._runner_facts, self._sink = scheduler, executor, facts, sink
        self._adapters = AdapterDesk(scheduler, executor, max_cpu_adapters)
        self._captures = CaptureRule(executor, facts.captures)
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._in_flight: deque[Flight] = deque()
        self._untold: StepDeltas | None = None
        self._asleep: list[str] = []
        self._compiler: Compiler | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._stopped = False
        self._ended: EngineDeadError | None = None
        self._host_ms = self._step_ms = 0.0
        self._stepped_at = self._ended_at = self._host_s = self._planning_s = 0.0
        self._next = Due()
        self.controls: dict[str, Callable[..., Any]] = {  # more may be put in before `run`
            "sleep": self._sleep,
            "wake": self._wake,
            "is_sleeping": lambda: bool(self._asleep),
            "reset_prefix_cache": scheduler.reset_prefix_cache,
            "fork": scheduler.fork,
            "load_adapter": self._adapters.load,
            "unload_adapter": self._adapters.unload,
            "adapters": lambda: [tuple(one.module) for one in scheduler.adapters.loaded.values()],
            "stats": self._stats,
            "memory": lambda: executor.collective("memory"),
        }

    @property
    def facts(self) -> EngineFacts:
        """What a frontend is told."""
        facts = self._runner_facts
        return EngineFacts(
            **{name: getattr(facts, name) for name in _SAME},
            tokens_per_page=facts.groups[0].tokens_per_page if facts.groups else 1,
            adapters=tuple(tuple(adapter.module) for adapter in facts.adapters),
            modalities=facts.media.modalities if facts.media is not None else (),
        )

    def follow_grammars(self, compiler: Compiler) -> None:
        """Take requests with structured output from now on; called before `run`."""
        self._compiler = compiler

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its answers, a refusal included, come through the sink."""
        self._put(lambda: self._submit(request), lambda error: self._sink.rejected(request.request_id, error))

    def abort(self, request_ids: list[str], sequence: int | None = None) -> None:
        """End requests, or one sequence of each; unknown ids are ignored."""
        self._put(lambda: self._abort(request_ids, sequence), lambda error: None)

    def call(self, method: str, arguments: dict[str, Any]) -> Future[Any]:
        """A control call, between steps. Its future raises `RequestError` for unknown methods, `EngineDeadError` after the end."""
        future: Future[Any] = Future()
        self._put(lambda: self._answer(future, method, arguments), future.set_exception)
        return future

    def health(self) -> None:
        """Raises `EngineDeadError` when the loop or a rank has ended."""
        if self._ended is not None:
            raise self._ended
        self._executor.health()

    def rank_failed(self, error: EngineDeadError) -> None:
        """Told by an executor whose rank ended, perhaps while the loop is idle."""

        def fail() -> None:
            raise error

        self._put(fail, lambda _: None)

    def wake(self) -> None:
        """Look for work: something outside has changed."""
        self._put(lambda: None, lambda _: None)

    def stop(self) -> None:
        """Make `run` return after the step in flight; idempotent."""
        self._commands.put(None)

    def run(self) -> None:
        """Serve until `stop`. A failure ends the loop: requests and the sink are told, and it is raised here as `EngineDeadError`."""
        try:
            wait: float | None = None
            while self._take_commands(wait):
                wait = self._step()
        except BaseException as error:
            self._tell()
            dead = error if isinstance(error, EngineDeadError) else EngineDeadError(f"the engine loop failed: {_told(error)}")
            self._end(dead)
            self._sink.dead(dead)
            raise dead from error
        self._tell()
        self._end(EngineDeadError("the engine was stopped"))

    def _put(self, run: Callable[[], None], refuse: Callable[[EngineDeadError], None]) -> None:
        with self._lock:
            if self._ended is None:
                self._commands.put(Command(run, refuse))
                return
        refuse(self._ended)

    def _end(self, error: EngineDeadError) -> None:
        with self._lock:
            self._ended = error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(error)

    def _take_commands(self, wait: float | None) -> bool:
        """Run what was asked meanwhile; waits for something so many seconds, None: as long as it takes, which is time for captures.
        Where much was asked at once, a step to plan or to commit comes before the rest of it. False: stop."""
        began: float | None = None
        while not self._stopped and (wait != 0 or not self._commands.empty()):
            idle = wait is None and not (self._asleep or self._in_flight or self._scheduler.has_work)
            try:
                command = self._commands.get(timeout=self._captures.patience if idle else wait)
            except Empty:
                if not idle:
                    return True
                self._captures.capture()
                continue
            began = time.perf_counter() if began is None else began
            self._run(command)
            wait = 0
            if self._interrupts(began):
                break
        return not self._stopped

    def _run(self, command: Command | None) -> None:
        if command is None:
            self._stopped = True
            return
        if command is not NOTHING:
            self._tell()
        command.run()

    def _interrupts(self, began: float) -> bool:
        """Whether a step should be looked at before more of what was asked since `began`."""
        if self._in_flight:
            full = len(self._in_flight) >= self._runner_facts.overlap
            return self._in_flight[0].future.done() or (not full and self._scheduler.fills_a_step)
        return self._scheduler.fills_a_step or (self._scheduler.has_work and time.perf_counter() - began >= EAGER_S)

    def _take_arrivals(self) -> None:
        """What waits is let in behind the step that runs, until it fills the next one, which would else be planned without it."""
        while not (self._stopped or self._commands.empty() or self._scheduler.fills_a_step or self._in_flight[0].future.done()):
            self._run(self._commands.get())

    def _step(self) -> float | None:
        """Plan what is due and commit the oldest step where it has ended. Returns how long to wait for something to happen, see
        `_take_commands`."""
        wait = self._plan_due()
        self._tell()
        if not self._in_flight or not self._in_flight[0].future.done():
            return wait
        self._commit(self._in_flight.popleft())
        return 0

    def _plan_due(self) -> float | None:
        """Returns in how many seconds a further step is due; None: not before something happens."""
        began = time.perf_counter()
        while (wait := self._due(began)) == 0:
            plan = self._plan()
            if plan is None:
                return None
            self._submit_step(plan, began)
            self._planning_s += time.perf_counter() - began
            self._take_arrivals()
            began = time.perf_counter()
        return wait

    def _due(self, now: float) -> float | None:
        if len(self._in_flight) >= self._runner_facts.overlap:
            return None
        if not self._in_flight or not self._runner_facts.in_calls or not self._scheduler.has_slots:
            return 0
        running = self._in_flight[0]
        if running.future.done():
            return 0
        return self._next.left_s(now - max(running.began, self._ended_at), running.expected_ms, self._host_s)

    def _plan(self) -> StepPlan | None:
        return None if self._asleep else self._scheduler.plan(self._captures.may_capture(self._scheduler.awaits_first_tokens))

    def _submit_step(self, plan: StepPlan, began: float) -> None:
        flight = Flight(plan, self._executor.submit(plan), began, self._scheduler.expected_ms(plan))
        self._captures.submitted(plan)
        if self._in_flight:
            self._next.planned(late=self._in_flight[-1].future.done())
        self._in_flight.append(flight)
        flight.future.add_done_callback(lambda _: self._landed(flight))

    def _landed(self, flight: Flight) -> None:
        flight.ended = time.perf_counter()
        self._commands.put(NOTHING)

    def _commit(self, flight: Flight) -> None:
        began = time.perf_counter()
        ended = flight.ended or began
        result = flight.future.result()
        deltas = self._scheduler.commit(flight.plan, result)
        self._untold = deltas if len(deltas) else None
        if self._in_flight:  # else the ranks would wait for those who hear of it
            self._tell()
        self._captures.committed(flight.plan, result, self._note_times(flight, ended, self._planning_s + time.perf_counter() - began))

    def _tell(self) -> None:
        untold, self._untold = self._untold, None
        if untold is not None:
            self._sink.deltas(untold)

    def _note_times(self, flight: Flight, ended: float, host_s: float) -> float:
        """Returns the seconds of the step."""
        now, steps = time.perf_counter(), flight.plan.num_steps
        seconds = now - max(flight.began, self._stepped_at)
        self._host_s, self._planning_s = host_s, 0.0
        self._host_ms = 1e3 * host_s / steps
        self._step_ms = 1e3 * seconds / steps
        self._scheduler.note_pace(flight.plan, 1e3 * max(0.0, ended - max(flight.began, self._ended_at)) / steps)
        self._stepped_at, self._ended_at = now, ended
        return seconds

    def _abort(self, request_ids: list[str], sequence: int | None) -> None:
        if sequence is None:
            deltas = self._scheduler.abort(request_ids)
        else:
            deltas = [delta for name in request_ids for delta in self._scheduler.abort_sequence(name, sequence)]
        self._sink.deltas(StepDeltas(others=deltas))

    def _submit(self, request: EngineRequest) -> None:
        try:
            if self._asleep:
                raise RequestError("the engine sleeps; wake it before sending requests", code="asleep")
            if request.adapter is not None:
                self._adapters.ensure(request.adapter)
            if request.params.structured_outputs is not None:
                self._submit_structured(request, request.params.structured_outputs)
            else:
                self._scheduler.submit(request)
        except PagodaError as error:
            self._sink.rejected(request.request_id, error)

    def _submit_structured(self, request: EngineRequest, structured: StructuredOutputsParams) -> None:
        """It waits until its grammar is compiled, which happens beside the loop."""
        if self._compiler is None or request.beam_width:
            why = "beam search cannot follow a grammar" if request.beam_width else "this engine has no compiler of grammars"
            raise RequestError(f"structured output is not possible here: {why}", param=structured.origin)
        if self._compiling is None:
            self._compiling = ThreadPoolExecutor(COMPILING, thread_name_prefix="grammar")
        self._scheduler.submit(request, [State.WAITING_GRAMMAR])
        compiled = self._compiling.submit(self._compiler, structured)
        compiled.add_done_callback(
            lambda done: self._put(lambda: self._compiled(request.request_id, done, structured.origin), lambda _: None)
        )

    def _compiled(self, request_id: str, done: Future[Grammar], origin: str) -> None:
        error = done.exception()
        if error is None:
            self._scheduler.give_grammar(request_id, done.result())
        elif self._scheduler.abort([request_id]):
            refused = error if isinstance(error, PagodaError) else RequestError(f"no grammar can be made: {error}", param=origin)
            self._sink.rejected(request_id, refused)

    def _answer(self, future: Future[Any], method: str, arguments: dict[str, Any]) -> None:
        try:
            if method not in self.controls:
                raise RequestError(f"no control call {method!r}; there are {', '.join(sorted(self.controls))}", param="method")
            answer = self.controls[method](**arguments)
        except (PagodaError, TypeError) as error:
            future.set_exception(error if isinstance(error, PagodaError) else RequestError(f"{method}: {error}"))
        else:
            future.set_result(answer)

    def _stats(self) -> EngineStats:
        captured, left = self._captures.counts
        stats = replace(self._scheduler.stats(), step_ms=self._step_ms, host_ms=self._host_ms, sleep_level=len(self._asleep))
        return replace(stats, steps_captured=captured, steps_to_capture=left)

    def _sleep(self, level: int = 1) -> None:
        """Level 1 drops the KV pool, level 2 the weights too. Refused while requests are unfinished."""
        if level not in (1, 2):
            raise RequestError(f"sleep level {level} is unknown; 1 drops the KV pool, 2 the weights too", param="level")
        if self._scheduler.has_work:
            raise RequestError("the engine still has unfinished requests; wait for them or abort them before sleep")
        if self._asleep:
            return
        self._scheduler.reset_prefix_cache()
        self._asleep = ["kv"] if level == 1 else ["kv", "weights"]
        for kind in self._asleep:
            self._executor.collective("release", kind=kind)
        self._captures.forgotten()

    def _wake(self, kinds: Sequence[str] | None = None) -> None:
        """`kinds`: "kv", "weights"; all that sleeps by default."""
        woken = [kind for kind in reversed(self._asleep) if kinds is None or kind in kinds]  # weights before the pages bound to them
        if woken == ["kv"] and "weights" in self._asleep:
            raise RequestError("the weights sleep too; wake them first, or together with the KV cache", param="tags")
        for kind in woken:
            self._executor.collective("restore", kind=kind)
        if "weights" in woken:
            self._scheduler.adapters.forget()
        self._asleep = [kind for kind in self._asleep if kind not in woken]


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, PagodaError) else repr(error)
