"""Engines whose steps last until a test lets them go: what it does, it does while its requests run, however fast the engine would be."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from pagoda.serving.engine.core import Sink
from pagoda.serving.engine.inprocess_client import Engine, EngineStarter, InProcessClient
from pagoda.serving.engine.plan import StepPlan, StepResult

T = TypeVar("T")

STEP_S = 0.2
"""A request of 200 tokens lives for 40 seconds: longer than any machine stands still."""


class Brake(Protocol):
    """Steps are slow while it is on."""

    def released(self, within: float) -> bool: ...


class HandBrake:
    """For engines in this process: on from the start."""

    def __init__(self) -> None:
        self._released = threading.Event()

    def put_on(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def released(self, within: float) -> bool:
        return self._released.wait(within)


class FileBrake:
    """For engines in other processes: on while a file is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put_on(self) -> None:
        self._path.touch()

    def release(self) -> None:
        self._path.unlink()

    def released(self, within: float) -> bool:
        end = time.monotonic() + within
        while self._path.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return not self._path.exists()


def slow_engine(starter: EngineStarter, brake: Brake, sink: Sink) -> Engine:
    """The starter's engine with that brake; a partial of this is an `EngineStarter`."""
    engine = starter(sink)
    submit = engine.executor.submit
    queue: SimpleQueue[tuple[Future[StepResult], Future[StepResult]]] = SimpleQueue()

    def slow(plan: StepPlan) -> Future[StepResult]:
        answer: Future[StepResult] = Future()
        queue.put((submit(plan), answer))
        return answer

    engine.executor.submit = slow  # type: ignore[method-assign]
    threading.Thread(target=_answer, args=(brake, queue.get), name="brake", daemon=True).start()
    return engine


def _answer(brake: Brake, take: Callable[[], tuple[Future[Any], Future[Any]]]) -> None:
    while True:
        computed, answer = take()
        brake.released(STEP_S)
        error = computed.exception()
        answer.set_exception(error) if error is not None else answer.set_result(computed.result())


async def side_by_side(client: InProcessClient, brake: HandBrake, *answers: Awaitable[T]) -> list[T]:
    """What requests answer that all come before the first of them ends; the client's engine has this brake, which is on."""
    made = asyncio.gather(*answers)
    while (stats := await client.stats()).running + stats.waiting < len(answers):
        await asyncio.sleep(0.005)
    brake.release()
    return list(await made)
