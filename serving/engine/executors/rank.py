"""What a rank's process runs: a worker driven by messages. Rank 0 answers with results, the others only when something failed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

from pagoda.serving.engine.child import Inbox, Outbox, portable
from pagoda.serving.engine.executors.worker import Worker
from pagoda.serving.engine.plan import StepPlan


class Reply(NamedTuple):
    """A rank's answer to the message of this number, or its failure."""

    number: int
    kind: Literal["value", "error"]
    value: Any


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """Messages: first (topology, builder); then (number, plan) or (number, method, arguments, aside); None stops."""
    topology, builder = inbox.get()
    worker = Worker(topology)
    name = f"rank {topology.rank}"

    def answer(number: int, future: Future[Any], silent: bool = False) -> None:
        def send(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None:
                outbox.send(Reply(number, "error", portable(error, name)))
            elif not silent:
                outbox.send(Reply(number, "value", done.result()))

        future.add_done_callback(send)

    answer(-1, worker.build(builder))
    while (message := inbox.get()) is not None:
        match message:
            case (number, StepPlan() as plan):
                answer(number, worker.submit(plan), silent=topology.rank > 0)
            case (number, method, arguments, aside):
                answer(number, worker.call(method, arguments, aside))
    worker.stop()
    return 0
