"""Order and time device work."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the work before the event has finished; never blocks."""
        ...

    def wait(self) -> None:
        """Block the host until the work before the event has finished."""
        ...

    def elapsed_ms(self, other: Event) -> float:
        """Milliseconds of device time from this event to `other`; both must be done."""
        ...


class Stream(Protocol):
    """A queue of device work; `with stream:` submits to it."""

    def record(self) -> Event:
        """An event after all work submitted so far."""
        ...

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after `event`; the host does not block."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
