"""One rank's thread: builds the runner there, starts steps in order, and answers each when its values are on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from pagoda.hal.comm import Topology
from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult
from pagoda.serving.engine.profiling import Profiler
from pagoda.serving.engine.results import Pending
from pagoda.serving.engine.runner import Runner
from pagoda.serving.engine.turns import take_usual_turns

RunnerBuilder = Callable[[Topology], Runner]
"""Loads the model of one rank; picklable where ranks are processes (a module's function, or a partial of one)."""

Job = Callable[[], None]


class Worker:
    """A rank. All device work is submitted by its one thread; a second one waits for devices that work asynchronously."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._waits: SimpleQueue[tuple[Pending, Future[StepResult]] | None] = SimpleQueue()
        self._runner: Runner | None = None
        self._profiler = Profiler(topology.rank)
        self._broken: BaseException | None = None
        self._aside = ThreadPoolExecutor(1, thread_name_prefix=f"rank-{topology.rank}-aside")
        name = f"rank-{topology.rank}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"{name}-results", daemon=True)
        self._thread.start()
        self._waiter.start()

    def build(self, builder: RunnerBuilder) -> Future[RunnerFacts]:
        """Make the runner; the first thing to call."""

        def build() -> RunnerFacts:
            self._runner = builder(self.topology)
            return self._runner.facts

        return self._enqueue(build)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step. A step that fails breaks the rank: later ones fail with the same error."""
        future: Future[StepResult] = Future()
        self._jobs.put(lambda: self._launch(plan, future))
        return future

    def call(self, method: str, arguments: dict[str, Any], aside: bool = False) -> Future[Any]:
        """Queue a call of a public method of the runner, or of the profiler, between steps; `aside`: in a thread of its own, after other
        such calls."""

        def call() -> Any:
            return getattr(self._profiler if hasattr(Profiler, method) else self._runner, method)(**arguments)

        return self._aside.submit(call) if aside else self._enqueue(call)

    def stop(self) -> None:
        """Finish what is queued and end the threads; idempotent."""
        self._jobs.put(None)
        for thread in (self._thread, self._waiter):
            if thread is not threading.current_thread():
                thread.join()

    def _enqueue(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                answer = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(answer)

        self._jobs.put(job)
        return future

    def _launch(self, plan: StepPlan, future: Future[StepResult]) -> None:
        try:
            if self._runner is None or self._broken is not None:
                raise self._broken or EngineDeadError("a step was submitted before the runner was built")
            with self._profiler.step(len(plan.slots), len(plan.token_ids)):
                pending = self._runner.launch(plan)
            if not pending.done:
                self._waits.put((pending, future))
                return
            result = pending.wait()
        except BaseException as error:
            self._broken = error
            future.set_exception(error)
        else:
            future.set_result(result)

    def _work(self) -> None:
        take_usual_turns()  # the runner's threads are started here
        while (job := self._jobs.get()) is not None:
            job()
        self._waits.put(None)
        self._waiter.join()
        self._aside.shutdown()
        if self._runner is not None and self._broken is None:
            self._runner.close()
        self._runner = None

    def _wait(self) -> None:
        while (entry := self._waits.get()) is not None:
            pending, future = entry
            try:
                result = pending.wait()
            except BaseException as error:
                self._broken = error
                future.set_exception(error)
            else:
                future.set_result(result)
