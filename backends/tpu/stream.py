"""Order on a lazy device: one queue in submission order; an event closes what was recorded before it."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter_ns
from types import TracebackType
from typing import Self

import torch
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.errors import DeviceError
from pagoda.hal.stream import Event


class TpuEvent:
    """The work recorded before it was started when it was made; the runtime tells no more than that all is done."""

    def __init__(self, runtime: Runtime) -> None:
        runtime.run()
        self._runtime = runtime
        self._ns = 0

    def done(self) -> bool:
        self.wait()
        return True

    def wait(self) -> None:
        if not self._ns:
            self._runtime.wait()
            self._ns = perf_counter_ns()

    def elapsed_ms(self, other: Event) -> float:
        if not isinstance(other, TpuEvent):
            raise DeviceError(f"events of two devices cannot be compared: {type(self).__name__} and {type(other).__name__}")
        return max(0.0, (other._ns - self._ns) / 1e6)


class TpuStream:
    """The only queue: everything runs in the order in which it was recorded.

    `with stream:` leaves inference mode, in which torch-xla cannot slice tensors that were made outside it; gradients stay off.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._contexts: list[ExitStack] = []

    def record(self) -> Event:
        return TpuEvent(self._runtime)

    def wait(self, event: Event) -> None:
        if not isinstance(event, TpuEvent):
            event.wait()

    def __enter__(self) -> Self:
        self._contexts.append(ExitStack())
        self._contexts[-1].enter_context(torch.inference_mode(False))
        self._contexts[-1].enter_context(torch.no_grad())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._contexts.pop().close()
