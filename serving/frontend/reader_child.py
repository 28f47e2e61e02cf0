"""What strangers send, read in a process of its own: decoders are large and slow, and a file that ends one harms nobody else."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import Any, NamedTuple

from pagoda.hal.errors import PagodaError, RequestError
from pagoda.serving.engine.child import Child, Inbox, Outbox

SECONDS = 120.0
"""For one request, imports of the first included."""


class Reader(NamedTuple):
    """A kind of such processes: the function that it runs ("module:function"), how errors call it and what it reads, what it imports
    first, and the request's field with what is read."""

    target: str
    name: str
    reads: str
    early: tuple[str, ...]
    param: str


class ReaderChild:
    """Started when the first request comes that needs it, and again after it had to be killed. Thread-safe; one request at a time."""

    def __init__(self, reader: Reader, told: Any) -> None:
        """`told`: what the process is sent first."""
        self._reader, self._told, self._lock = reader, told, Lock()
        self._child: Child | None = None

    def ask(self, message: Any) -> Any:
        """What the process makes of a message. Raises `RequestError` for what it refuses or takes too long for."""
        with self._lock:
            child = self._child or self._start()
            self._child = None
            try:
                child.connection.send(message)
                answer = child.connection.recv() if child.connection.poll(SECONDS) else None
            except (EOFError, OSError):
                raise PagodaError(f"{child.death()}; it read {self._reader.reads} of this request, others are served") from None
            if answer is None:
                child.kill()
                raise RequestError(
                    f"the {self._reader.reads} were not read within {SECONDS:.0f} s; send smaller or fewer ones", param=self._reader.param
                )
            self._child = child
        if isinstance(answer, PagodaError):
            raise answer
        return answer

    def _start(self) -> Child:
        child = Child(self._reader.target, self._reader.name, self._reader.early)
        weakref.finalize(self, child.kill)
        child.connection.send(self._told)
        return child


def answer_all(inbox: Inbox, outbox: Outbox, read: Any, failed: str) -> None:
    """In the child: each message, a tuple, answered by what `read` makes of it, or by an error; until nothing more comes."""
    while (asked := inbox.get()) is not None:
        try:
            outbox.send(read(*asked))
        except RequestError as error:
            outbox.send(RequestError(str(error), param=error.param, code=error.code))
        except Exception as error:  # a library's own
            outbox.send(PagodaError(f"{failed}: {type(error).__name__}: {error}"))
