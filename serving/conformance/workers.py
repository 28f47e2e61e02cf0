"""Processes that open the device and share the parts of checks: who is free takes the next, and who dies or hangs loses that one alone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch
from pagoda.serving.conformance.answers import Answer, answer_of
from pagoda.serving.conformance.check import Split
from pagoda.serving.conformance.levels import all_checks, open_target
from pagoda.serving.conformance.ranks import ending
from pagoda.serving.conformance.report import Outcome

LATE = Answer(None, Outcome.SKIPPED, "not shown in the time that was given")


class Job(NamedTuple):
    """A part of a check."""

    level: int
    name: str
    part: int


Queue = SimpleQueue[Job]
Answers = SimpleQueue[tuple[Job, Answer]]


def shared(device: str, jobs: Sequence[Job], processes: int, until: float | None = None) -> Iterator[tuple[Job, Answer]]:
    """Answers to all jobs, as they come; jobs are begun in the order given. `until`: on `time.monotonic`, when what has not ended is
    ended."""
    waiting, answers = Queue(), Answers()
    for job in jobs:
        waiting.put(job)
    count = min(processes, len(jobs))
    threads = [Thread(target=_serve, args=(device, count, waiting, answers, until), daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in jobs:
        yield answers.get()
    for thread in threads:
        thread.join()


def _serve(device: str, count: int, waiting: Queue, answers: Answers, until: float | None) -> None:
    worker: _Worker | None = None
    while (job := _next(waiting)) is not None:
        if until is not None and time.monotonic() >= until:
            answers.put((job, LATE))
            continue
        worker = worker or _Worker(device, count)
        answers.put((job, worker.ask(job, until)))
        worker = worker if worker.lives else None
    if worker is not None:
        worker.end()


def _next(waiting: Queue) -> Job | None:
    try:
        return waiting.get_nowait()
    except Empty:
        return None


class _Worker:
    def __init__(self, device: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(device, count, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.lives = True

    def ask(self, job: Job, until: float | None) -> Answer:
        """After an answer that is not the job's own it lives no longer, nor after a failure: a device's fault may have spoiled all that the
        process does with it from then on."""
        try:
            self._pipe.send(job)
            if self._pipe.poll(None if until is None else max(0.0, until - time.monotonic())):
                answer: Answer = self._pipe.recv()
                if answer.outcome is Outcome.FAILED:
                    self.end()
                return answer
        except (EOFError, OSError):
            self.end()
            why = f"the process that checked this ended before it could answer: {ending(self._process.exitcode)}"
            return Answer(None, Outcome.FAILED, why)
        self._process.kill()
        self.end()
        return LATE

    def end(self) -> None:
        """It ends by itself when its pipe is closed; where it does not, it is ended."""
        self.lives = False
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(device: str, count: int, pipe: Connection) -> None:
    """One of `count` processes, which share the host's processors."""
    target, known = open_target(device), dict[int, dict[str, Split]]()
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    while (job := _received(pipe)) is not None:
        if job.level not in known:
            known[job.level] = {check.name: check.split for check in all_checks(target, [job.level]) if check.split is not None}
        part = known[job.level][job.name].parts[job.part]
        pipe.send(answer_of(lambda part=part: part(target)))


def _received(pipe: Connection) -> Job | None:
    try:
        job: Job = pipe.recv()
    except EOFError:
        return None
    return job
