"""An opened chip: streams, steps in fixed sizes, and the parts from the neighbouring modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Replay
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.stream import Event, Stream

from paperchip.group import GroupOfOne
from paperchip.memory import PaperMemory
from paperchip.pages import PaperLayout

T = TypeVar("T")

SIZES = (1, 2, 4, 8, 16, 32, 64)


class PaperDevice:
    """One chip."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.torch_device = torch.device("cpu")
        self.memory = PaperMemory(info.memory_bytes)
        self.graphs = PaperGraphs()

    def stream(self) -> Stream:
        return PaperStream()

    def synchronize(self) -> None:
        return None

    def communicator(self, topology: Topology) -> Communicator:
        if topology.world != 1:
            raise DeviceError(f"paper chips do not talk to each other; a group of {topology.world} was asked for, use 1")
        return GroupOfOne()

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        return PaperLayout(group, self.memory)

    def extension(self, protocol: type[T]) -> T | None:
        return None


class PaperEvent:
    """Work is done when its call returns, so an event is a moment."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def elapsed_ms(self, other: Event) -> float:
        assert isinstance(other, PaperEvent)
        return (other.at - self.at) * 1e3


class PaperStream:
    """In order, at once."""

    def record(self) -> Event:
        return PaperEvent()

    def wait(self, event: Event) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class PaperReplay:
    """Runs a recorded step over its inputs; outputs stay where they are."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
        self._fn, self._inputs = fn, inputs
        self._outputs = fn(*inputs)
        self.nbytes = 0

    def __call__(self) -> Any:
        _copy(self._outputs, self._fn(*self._inputs))
        return self._outputs


class PaperGraphs:
    """Steps come in fixed sizes only."""

    policy = GraphPolicy("captured", SIZES, SIZES, static_shapes=True, burst=3)

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        try:
            return PaperReplay(fn, inputs)
        except RuntimeError as error:
            raise DeviceError(f"step {key} does not run: {error}") from error


def _copy(kept: Any, fresh: Any) -> None:
    if isinstance(kept, torch.Tensor):
        kept.copy_(fresh)
    elif isinstance(kept, dict):
        for name in kept:
            _copy(kept[name], fresh[name])
    elif isinstance(kept, tuple | list):
        for old, new in zip(kept, fresh, strict=True):
            _copy(old, new)
