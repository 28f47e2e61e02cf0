"""One process a rank on this host: the same plan to all, results from rank 0, and the end of one rank is the end of all."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from typing import Any

from pagoda.hal.comm import Topology
from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.engine.child import Child
from pagoda.serving.engine.executors.rank import Reply
from pagoda.serving.engine.executors.worker import RunnerBuilder
from pagoda.serving.engine.plan import RunnerFacts, StepPlan, StepResult

TARGET = "pagoda.serving.engine.executors.rank:serve"


class MultiprocExecutor:
    """See `Executor`.

    Args:
        builder: picklable; called on every rank with its `Topology`.
        world: number of ranks.
        on_failure: told, from another thread, when a rank ends or fails.
    """

    def __init__(self, builder: RunnerBuilder, world: int, on_failure: Callable[[EngineDeadError], None] | None = None) -> None:
        self._builder, self._world = builder, world
        self.on_failure = on_failure
        self._ranks: list[Child] = []
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], Future[Any]] = {}
        self._number = 0
        self._failed: PagodaError | None = None
        self._stopping = False
        self._receiver = threading.Thread(target=self._receive, name="ranks", daemon=True)

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks, in order."""
        return [rank.process.pid for rank in self._ranks]

    def start(self) -> RunnerFacts:
        address = f"127.0.0.1:{_free_port()}"
        self._ranks = [Child(TARGET, f"rank {rank} of {self._world}") for rank in range(self._world)]
        built = [self._expect(-1, rank) for rank in range(self._world)]
        for rank, child in enumerate(self._ranks):
            child.connection.send((Topology(rank, self._world, address, "tp"), self._builder))
        self._receiver.start()
        try:
            facts: list[RunnerFacts] = [future.result() for future in built]
        except BaseException:
            self.stop()
            raise
        return facts[0]

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        return self._ask(plan, answers=1)[0]

    def collective(self, method: str, **arguments: Any) -> list[Any]:
        return [future.result() for future in self._ask(method, arguments, False, answers=self._world)]

    def post(self, method: str, *, aside: bool = False, **arguments: Any) -> Sequence[Future[Any]]:
        return self._ask(method, arguments, aside, answers=self._world)

    def health(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._stopping or not self._ranks:
            raise EngineDeadError("the executor is not running: it was stopped, or never started")

    def stop(self) -> None:
        self._stopping = True
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        for rank in self._ranks:
            rank.process.kill() if self._failed else None
            rank.stop()
        if self._receiver.is_alive() and self._receiver is not threading.current_thread():
            self._receiver.join()

    def _expect(self, number: int, rank: int) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting[number, rank] = future
        return future

    def _ask(self, *message: Any, answers: int) -> list[Future[Any]]:
        self.health()
        with self._lock:
            number = self._number
            self._number += 1
            futures = [self._expect(number, rank) for rank in range(answers)]
            payload = pickle.dumps((number, *message), pickle.HIGHEST_PROTOCOL)
            for rank in self._ranks:
                # A rank that ended is found by the receiver, which fails the futures.
                with contextlib.suppress(OSError):
                    rank.connection.send_bytes(payload)
        if self._failed is not None:
            self._fail_waiting(self._failed)
        return futures

    def _receive(self) -> None:
        ranks = {rank.connection: index for index, rank in enumerate(self._ranks)}
        while ranks:
            for connection in wait(list(ranks)):
                assert isinstance(connection, Connection)
                try:
                    self._take(ranks[connection], connection.recv())
                except (EOFError, OSError):
                    self._ended(ranks.pop(connection))

    def _take(self, rank: int, reply: Reply) -> None:
        future = self._waiting.pop((reply.number, rank), None)
        if reply.kind == "error":
            if future is not None:
                future.set_exception(reply.value)
            self._fail(reply.value)
        elif future is not None:
            future.set_result(reply.value)

    def _ended(self, rank: int) -> None:
        if not self._stopping:
            self._fail(self._ranks[rank].death())

    def _fail(self, error: PagodaError) -> None:
        if self._failed is None:
            self._failed = error
            if self.on_failure is not None and not self._stopping:
                self.on_failure(error if isinstance(error, EngineDeadError) else EngineDeadError(str(error)))
        self._fail_waiting(self._failed)

    def _fail_waiting(self, error: PagodaError) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
