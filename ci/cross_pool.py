"""Processes that work on one thing each, and are ended where that takes too long: LLVM's register allocator cannot be interrupted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")
ENDING = 10.0
"""Seconds that an idle process has to end by itself."""


@dataclass
class _Worker:
    process: BaseProcess
    line: Connection
    key: str = ""
    until: float = 0.0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()


class Lost(str):
    """Why there is no result."""


class Pool(Generic[Job, Result]):
    """Up to `jobs` processes that call `work`, a function of a module, for at most `limit` seconds at a time, those of the process's start
    included. To be used in a `with`, at whose end they end."""

    def __init__(self, work: Callable[[Job], Result], jobs: int, limit: float) -> None:
        self._work, self._jobs, self._limit = work, jobs, limit
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def __enter__(self) -> Pool[Job, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._idle:
            worker.line.send(None)
        for worker in self._idle:
            worker.process.join(ENDING)
        for worker in [*self._idle, *self._busy]:
            worker.end()

    def results(self, things: Mapping[str, Job]) -> Iterator[tuple[str, Result | Lost]]:
        """What becomes of each, as it comes; `Lost` where a process took too long or died."""
        waiting = deque(things.items())
        while waiting or self._busy:
            while waiting and len(self._busy) < self._jobs:
                self._give(*waiting.popleft())
            soonest = min(worker.until for worker in self._busy)
            ready = wait([worker.line for worker in self._busy], max(soonest - time.monotonic(), 0.0))
            for worker in list(self._busy):
                if worker.line in ready:
                    yield worker.key, self._taken(worker)
                elif worker.until <= time.monotonic():
                    self._busy.remove(worker)
                    worker.end()
                    yield worker.key, Lost(f"takes longer than {self._limit:.0f} s")

    def _give(self, key: str, job: Job) -> None:
        worker = self._idle.pop() if self._idle else self._started()
        worker.key, worker.until = key, time.monotonic() + self._limit
        self._busy.append(worker)
        worker.line.send((job,))

    def _started(self) -> _Worker:
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(self._work, there), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def _taken(self, worker: _Worker) -> Result | Lost:
        self._busy.remove(worker)
        try:
            result: Result = worker.line.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            worker.line.close()
            return Lost(f"ends its process, with {worker.process.exitcode}")
        self._idle.append(worker)
        return result


def _serve(work: Callable[[Any], Any], line: Connection) -> None:
    while (job := line.recv()) is not None:
        line.send(work(*job))
