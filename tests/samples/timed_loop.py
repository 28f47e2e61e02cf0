"""The engine's loop on simulated ranks, by a simulated clock: when steps are planned, begin and end, and when tokens come."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from random import Random

import pytest
from pagoda.serving.engine import core
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import RunnerFacts, StepPlan
from pagoda.serving.engine.scheduler import Scheduler, SchedulerConfig
from scheduler_toy import ToyRanks


class TimedLoop:
    """Ranks that do one step after the other. `costs`: milliseconds of a step, of each decode and of each token of a prompt; `host_ms`:
    what planning takes the host, `admit_ms`: what letting in a request does; `noise`: steps take up to this share more or less. `clock`
    puts it in the place of the loop's.

    Attributes: of each step its plan, and in seconds when it was `submitted`, when it `began` and when it ended (`ends`); when each
    token of a request came (`came`). All in order.
    """

    def __init__(
        self,
        facts: RunnerFacts,
        costs: tuple[float, float, float],
        host_ms: float = 0.0,
        noise: float = 0.0,
        admit_ms: float = 0.0,
        **config: int,
    ) -> None:
        self.now, self.costs, self.host_ms, self.noise, self.admit_ms = 0.0, costs, host_ms, noise, admit_ms
        self.random = Random(0)
        self.ranks = ToyRanks(facts)
        self.waiting: deque[Future] = deque()
        self.plans: list[StepPlan] = []
        self.submitted: list[float] = []
        self.began: list[float] = []
        self.ends: list[float] = []
        self.came: dict[str, list[float]] = {}
        scheduler = Scheduler(SchedulerConfig(**config), facts)
        self._let_in, scheduler.submit = scheduler.submit, self._submit  # type: ignore[method-assign]
        self.core = core.EngineCore(scheduler, self, facts, self)

    def clock(self, monkeypatch: pytest.MonkeyPatch) -> TimedLoop:
        monkeypatch.setattr(core, "time", self)
        return self

    def perf_counter(self) -> float:
        return self.now

    def ask(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.core.submit(
            EngineRequest(name, tuple(prompt), SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True))
        )

    def _submit(self, request: EngineRequest) -> None:
        self._let_in(request)
        self._until(self.now + self.admit_ms / 1000)

    def _until(self, now: float) -> None:
        """Time passes, and steps end meanwhile."""
        self.now = max(self.now, now)
        while self.waiting and self.ends[-len(self.waiting)] <= self.now:
            self.waiting.popleft().set_result(self.ranks.run()[1])

    def run(self, arrivals: dict[float, tuple[str, list[int], int]] | None = None, until: float = 1e9) -> None:
        """Until all has been answered, or that time. `arrivals`: what is asked when."""
        due = sorted((arrivals or {}).items())
        while self.now < until:
            self.core._take_commands(0.0)
            wait = self.core._step()
            if wait == 0 or not self.core._commands.empty():
                continue
            events = [due[0][0]] if due else []
            events += [self.ends[-len(self.waiting)]] if self.waiting else []
            events += [self.now + wait] if wait is not None else []
            if not events:
                return
            self._until(min(events))
            while due and due[0][0] <= self.now:
                self.ask(*due.pop(0)[1])

    def submit(self, plan: StepPlan) -> Future:
        self._until(self.now + self.host_ms / 1000)
        self.ranks.take(plan)
        self.plans.append(plan)
        self.submitted.append(self.now)
        self.began.append(max([self.now, *self.ends[-1:]]))
        self.ends.append(self.began[-1] + self.took(plan))
        self.waiting.append(Future())
        return self.waiting[-1]

    def took(self, plan: StepPlan) -> float:
        decodes = int((plan.lengths == 1).sum())
        each, decode, prompt = self.costs
        ms = each + decode * decodes + prompt * (plan.num_tokens - decodes)
        return plan.num_steps * ms / 1000 * (1 + self.noise * self.random.uniform(-1, 1))

    def deltas(self, deltas) -> None:
        for delta in deltas:
            self.came.setdefault(delta.request_id, []).extend(self.now for part in delta.sequences for _ in part.token_ids)

    def rejected(self, request_id: str, error: Exception) -> None:
        raise error

    def dead(self, error: Exception) -> None:
        raise error

    @property
    def idle(self) -> float:
        """Seconds that the ranks waited for the host between two steps."""
        return sum(began - ended for began, ended in zip(self.began[1:], self.ends, strict=False))

    def leads(self, first: int = 0) -> list[float]:
        """Of each step from the `first` on, for how long the one before still ran when it was submitted."""
        return [ended - asked for asked, ended in zip(self.submitted[first + 1 :], self.ends[first:], strict=False)]
