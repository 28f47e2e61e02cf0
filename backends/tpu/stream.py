"""Order on a lazy device: one queue in submission order; an event closes what was recorded before it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter_ns
from types import TracebackType
from typing import Self

import torch
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.errors import DeviceError
from pagoda.hal.stream import Event


class TpuEvent:
    """The work recorded before was started when it was made. The runtime says no more than that all is done, to one who waits: a thread
    does, so that nobody who asks has to."""

    def __init__(self, runtime: Runtime, waiter: ThreadPoolExecutor) -> None:
        runtime.run()
        self._ended = waiter.submit(_ended, runtime)

    def done(self) -> bool:
        return self._ended.done()

    def wait(self) -> None:
        self._ended.result()

    def elapsed_ms(self, other: Event) -> float:
        if not isinstance(other, TpuEvent):
            raise DeviceError(f"events of two devices cannot be compared: {type(self).__name__} and {type(other).__name__}")
        return max(0.0, (other._ended.result() - self._ended.result()) / 1e6)


def _ended(runtime: Runtime) -> int:
    runtime.wait()
    return perf_counter_ns()


class TpuStream:
    """The only queue: everything runs in the order in which it was recorded.

    `with stream:` leaves inference mode, in which torch-xla cannot slice tensors that were made outside it; gradients stay off.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiter = ThreadPoolExecutor(1, "pagoda-tpu-events")
        self._contexts: list[ExitStack] = []

    def record(self) -> Event:
        return TpuEvent(self._runtime, self._waiter)

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
