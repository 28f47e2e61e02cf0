"""Graphs of a torch device module: a step is warmed up on a side stream, recorded once into a pool shared by all buckets, then replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_host.graphs import put_into
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay

T = TypeVar("T")

ROWS = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32))
"""Decode sizes that are captured; larger steps, and those with prompts, run eagerly."""

BURST = 4
"""Decode steps in a row: enough to hide what a step costs the host behind what it costs a fast device."""


class AcceleratorReplay:
    """A recorded step: its pieces, and what runs as it is between them, in order."""

    def __init__(self, parts: list[Callable[[], object]], outputs: Any, nbytes: int) -> None:
        self._parts = parts
        self._outputs = outputs
        self.nbytes = nbytes

    def __call__(self) -> Any:
        try:
            for part in self._parts:
                part()
        except RuntimeError as error:
            raise DeviceError(f"a captured step could not be run again: {error}") from error
        return self._outputs


class _Recording:
    """A capture under way. `parts`: its pieces that have ended, and what was cut out between them."""

    def __init__(self, api: TorchApi, pool: Any) -> None:
        self._api, self._pool = api, pool
        self.parts: list[Callable[[], object]] = []
        self._begin()

    def _begin(self) -> None:
        self._graph = self._api.graph_class()
        self._piece = self._api.capture(self._graph, self._pool)
        self._piece.__enter__()
        self._open = True

    def end(self, error: BaseException | None = None) -> None:
        """End the piece, if there is one under way."""
        if not self._open:
            return
        self._open = False
        self._piece.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        self.parts.append(self._graph.replay)

    def cut(self, work: Callable[[], T]) -> T:
        self.end()
        self._graph.replay()  # nothing was computed yet, and what is cut out may look at it
        result = work()
        self.parts.append(lambda: put_into(result, work()))
        self._begin()
        return result


class AcceleratorGraphs:
    """Capture of steps on one device.

    Args:
        api: its torch module, which must have graphs.
        device: the device.
        policy: buckets.
    """

    def __init__(self, api: TorchApi, device: torch.device, policy: GraphPolicy | None = None) -> None:
        self.policy = policy or GraphPolicy("captured", ROWS, ROWS, burst=BURST)
        self._api = api
        self._device = device
        self._pool: Any = None
        self._keeper: Any = None
        self._recording: _Recording | None = None

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        before = self._api.reserved(self._device)
        try:
            self._warm_up(fn, inputs)
            parts, outputs = self._record(fn, inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be captured: {error}") from error
        return AcceleratorReplay(parts, outputs, max(0, self._api.reserved(self._device) - before))

    def cut(self, work: Callable[[], T]) -> T:
        """See `hal.graphs.Pieces`."""
        return work() if self._recording is None else self._recording.cut(work)

    def _record(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> tuple[list[Callable[[], object]], Any]:
        recording = self._recording = _Recording(self._api, self._shared_pool())
        try:
            outputs = fn(*inputs)
        except BaseException as error:
            recording.end(error)
            raise
        finally:
            self._recording = None
        recording.end()
        return recording.parts, outputs

    def _shared_pool(self) -> Any:
        """The pool of all buckets, if any. A graph of its own holds it: torch cannot capture into a pool whose graphs have all gone."""
        if self._keeper is None and self._api.pools():
            self._keeper, self._pool = self._api.graph_class(), self._api.module.graph_pool_handle()
            with self._api.capture(self._keeper, self._pool):
                torch.zeros(1, device=self._device)
        return self._pool

    def _warm_up(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        """Compiles and allocates outside the capture."""
        side, current = self._api.module.Stream(self._device), self._api.current_stream(self._device)
        side.wait_stream(current)
        with self._api.within(side):
            fn(*inputs)
        current.wait_stream(side)
