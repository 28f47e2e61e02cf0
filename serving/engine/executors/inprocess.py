"""The one rank of a replica in this process, in a thread of its own so that planning overlaps device work."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from pagoda.hal.comm import Topology
from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine.executors.worker import RunnerBuilder, Worker
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult


class InProcessExecutor:
    """See `Executor`. The world has one rank."""

    def __init__(self, builder: RunnerBuilder) -> None:
        self._builder = builder
        self._worker: Worker | None = None

    def start(self) -> RunnerFacts:
        self._worker = Worker(Topology(rank=0, world=1, name="tp"))
        try:
            return self._worker.build(self._builder).result()
        except BaseException:
            self.stop()
            raise

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._running().submit(plan)

    def collective(self, method: str, **arguments: Any) -> list[Any]:
        return [self._running().call(method, arguments).result()]

    def post(self, method: str, *, aside: bool = False, **arguments: Any) -> Sequence[Future[Any]]:
        return [self._running().call(method, arguments, aside)]

    def health(self) -> None:
        self._running()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _running(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor is not running: it was stopped, or never started")
        return self._worker
