"""Streams and events of a synchronous device: work is done when its call returns, so an event is a point in time."""

from __future__ import annotations

from time import perf_counter_ns
from types import TracebackType
from typing import Self

from pagoda.hal.errors import DeviceError
from pagoda.hal.stream import Event


class HostEvent:
    """A point in time; all work before it is done."""

    def __init__(self) -> None:
        self._ns = perf_counter_ns()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def elapsed_ms(self, other: Event) -> float:
        if not isinstance(other, HostEvent):
            raise DeviceError(f"events of two devices cannot be compared: {type(self).__name__} and {type(other).__name__}")
        return (other._ns - self._ns) / 1e6


class HostStream:
    """Runs everything in the calling thread, in order."""

    def record(self) -> Event:
        return HostEvent()

    def wait(self, event: Event) -> None:
        event.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None
