"""The scheduler: decides who gets how many tokens of each step's budget, and turns the step's result into deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.messages import EngineRequest, EngineStats, RequestDelta, StepDeltas
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler takes of `EngineConfig`; the names are the same."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    seed: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> SchedulerConfig:
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


class Scheduler:
    """One replica's requests. Single-threaded: the engine loop owns it.

    The loop: while `plan()` gives a step, submit it; then `commit` the oldest step in flight. `plan` answers None when there is
    nothing to do now, or when `facts.overlap` steps are in flight. Slots are `0 … max_num_seqs − 1`.
    """

    def __init__(self, config: SchedulerConfig, facts: RunnerFacts) -> None: ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` or `CapacityError` (naming the number that is too big) when it can never fit."""
        raise NotImplementedError

    def abort(self, request_ids: Iterable[str]) -> list[RequestDelta]:
        """End requests now; unknown ids are ignored. Returns their last deltas. Pages are free once steps in flight have committed."""
        raise NotImplementedError

    def plan(self) -> StepPlan | None:
        """The next step, or None."""
        raise NotImplementedError

    def commit(self, plan: StepPlan, result: StepResult) -> StepDeltas:
        """Take a step's result; steps are committed in the order of their plans."""
        raise NotImplementedError

    def fail(self, message: str, request_ids: Iterable[str] | None = None) -> list[RequestDelta]:
        """End requests with ERROR and this message; None: all of them, and forget the steps in flight."""
        raise NotImplementedError

    def fork(self, request_id: str, token: int | None = None, sequence: int = 0) -> int:
        """A new sequence that continues a running one, after `token` where given. Returns its index in the request."""
        raise NotImplementedError

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages. False, and nothing forgotten, while requests hold pages."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished or any step not committed."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """A snapshot; `step_ms` and `host_ms` are the loop's to fill in."""
        raise NotImplementedError
