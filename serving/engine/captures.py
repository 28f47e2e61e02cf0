"""When the ranks capture steps ahead of need: while nobody asks for anything, and steps that run within a share of the time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagoda.hal.errors import EngineDeadError
from pagoda.serving.engine.executor import Executor
from pagoda.serving.engine.plan import CaptureReport, Captures, StepPlan, StepResult

log = logging.getLogger("pagoda.engine")

IDLE_SECONDS = 0.02
"""Without any request for so long, the next step is captured: a request waits for one capture at most."""

SHARE = 0.05
"""Of the time in which steps run, what their captures may take."""

STARVED_SECONDS = 10.0
"""While somebody waits for a first token nothing is captured, unless somebody has waited all of this time: then the engine is so busy
that it is idle no sooner, and pays for steps that are not captured with each of them."""


class CaptureRule:
    """The engine loop's side of captures; all ranks capture the same at the same place between steps, as they are told.

    Args:
        counts: of the ranks as they were loaded; None where they capture nothing ahead of need.
    """

    def __init__(self, executor: Executor, counts: Captures | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor, self._clock = executor, clock
        self._ahead = counts is not None
        self.counts = counts or Captures()
        self._in_flight = False
        self._next = self._last_chance = clock()

    @property
    def patience(self) -> float | None:
        """How long to wait for something to do before the next capture; None: for ever."""
        return IDLE_SECONDS if self._ahead and self.counts.left else None

    def may_capture(self, somebody_waits: Callable[[], bool]) -> bool:
        """Whether the next plan may say `capture`. `somebody_waits`: for a first token."""
        now = self._clock()
        if not self._ahead or self._in_flight or now < self._next:
            return False
        if not somebody_waits():
            self._last_chance = now
            return True
        return now - self._last_chance > STARVED_SECONDS

    def submitted(self, plan: StepPlan) -> None:
        self._in_flight |= plan.capture

    def committed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A step has answered, so long after the one before."""
        if plan.capture:
            self._in_flight = False
        if result.captures is None:
            return
        if result.captures.captured > self.counts.captured:
            self._last_chance = self._clock()
            self._next = self._last_chance + seconds * (1 / SHARE - 1)
        self._take(result.captures)

    def capture(self) -> None:
        """Capture what is next on every rank, which has no sequences. Raises `EngineDeadError` where ranks did not do the same."""
        reports: list[CaptureReport] = self._executor.collective("capture_next")
        failed = next((report for report in reports if report.error is not None), None)
        if failed is not None:
            self._ahead = False
            self._executor.collective("undo_capture")
            log.warning("steps that are not captured yet run as they are from now on: %s failed: %s", failed.job, failed.error)
        elif any(report != reports[0] for report in reports):
            raise EngineDeadError(f"ranks captured different steps: {'; '.join(map(str, reports))}")
        self._take(reports[0].counts)

    def forgotten(self) -> None:
        """The ranks have released what captures need (sleep), and will capture again."""
        self.counts = Captures(0, 1) if self._ahead else Captures()

    def _take(self, counts: Captures) -> None:
        if self.counts.left and not counts.left and self._ahead:
            log.info("all steps are captured: %d", counts.captured)
        self.counts = counts
