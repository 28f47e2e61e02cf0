"""Streams and events of a torch device module."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.hal.errors import DeviceError
from pagoda.hal.stream import Event


class AcceleratorEvent:
    """A timing event of torch."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def elapsed_ms(self, other: Event) -> float:
        if not isinstance(other, AcceleratorEvent):
            raise DeviceError(f"events of two devices cannot be compared: {type(self).__name__} and {type(other).__name__}")
        return float(self.event.elapsed_time(other.event))


class AcceleratorStream:
    """A stream of torch, which `with` makes current; the only one where the module has no streams."""

    def __init__(self, api: TorchApi, device: torch.device) -> None:
        self._api = api
        self._stream = api.stream(device)
        self._contexts: list[AbstractContextManager[Any]] = []

    def record(self) -> Event:
        event = self._api.event()
        event.record() if self._stream is None else event.record(self._stream)
        return AcceleratorEvent(event)

    def wait(self, event: Event) -> None:
        if isinstance(event, AcceleratorEvent) and self._stream is not None:
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def __enter__(self) -> Self:
        self._contexts.append(self._api.within(self._stream))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._contexts.pop().__exit__(kind, error, trace)
