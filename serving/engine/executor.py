"""The ranks of one replica as the engine core sees them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult


class Executor(Protocol):
    """Loads the model on its ranks and runs plans there, in order."""

    def start(self) -> RunnerFacts:
        """Load, allocate the pool, warm up; blocks. Raises the rank's own `PagodaError` when one fails."""
        ...

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step on all ranks; returns at once. Results come in submission order."""
        ...

    def collective(self, method: str, **arguments: Any) -> list[Any]:
        """Call a runner method on every rank between steps; one answer a rank."""
        ...

    def post(self, method: str, *, aside: bool = False, **arguments: Any) -> Sequence[Future[Any]]:
        """The same, without waiting: a future a rank, called back from any thread. `aside`: in a thread of its own, beside the steps."""
        ...

    def health(self) -> None:
        """Returns while every rank lives; raises `EngineDeadError` naming the one that does not."""
        ...

    def stop(self) -> None:
        """End all ranks and wait for them; idempotent, leaves no orphan."""
        ...
