"""A device of meta tensors: shapes without bytes. A step runs once, for its shapes; its replay hands out zeros."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar

import torch
from pagoda.backends.torch_host.comm import LoneCommunicator
from pagoda.backends.torch_host.kv import host_layout
from pagoda.backends.torch_host.memory import HostMemory
from pagoda.backends.torch_host.stream import HostStream
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Graphs, Replay
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.memory import Memory
from pagoda.hal.stream import Stream

T = TypeVar("T")

_ROWS = (1, 2, 4, *range(8, 257, 8))
_TOKENS = (*_ROWS, *range(288, 513, 32), *range(640, 2049, 128), 4096, 8192)


class NullReplay:
    """Hands out the same zeros each time, on the host, so that whoever reads a step's results can."""

    nbytes = 0

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def __call__(self) -> Any:
        return self._outputs


class NullGraphs:
    """Every step is padded to a bucket, as on a device with static shapes."""

    policy = GraphPolicy("captured", _TOKENS, _ROWS, static_shapes=True)

    def capture(self, key: Hashable, fn: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Replay:
        try:
            return NullReplay(_zeros(fn(*inputs)))
        except RuntimeError as error:
            raise DeviceError(f"step {key} could not be traced for its shapes: {error}") from error

    def cut(self, work: Callable[[], T]) -> T:
        """See `hal.graphs.Pieces`."""
        return work()


class NullDevice:
    """Looks like the device that `info` describes."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.torch_device = torch.device("meta")
        self.memory: Memory = HostMemory(info.memory_bytes, lambda: info.memory_bytes, self.torch_device)
        self.graphs: Graphs = NullGraphs()

    def stream(self) -> Stream:
        return HostStream()

    def synchronize(self) -> None:
        return None

    def communicator(self, topology: Topology) -> Communicator:
        return NullCommunicator(topology)

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        return host_layout(group, self.memory, self.info.limits.alignment)

    def extension(self, protocol: type[T]) -> T | None:
        return None


class NullCommunicator(LoneCommunicator):
    """Any rank of any world, alone: results have the right shapes and no meaning."""

    def __init__(self, topology: Topology) -> None:
        self.rank = topology.rank
        self.world = topology.world

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([x] * self.world, dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x.chunk(self.world, dim=dim)[self.rank]

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return x.new_empty((sum(receive), *x.shape[1:]))

    def send(self, x: torch.Tensor, to: int) -> None:
        return None

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x


def _zeros(tree: Any) -> Any:
    """The same nesting with host zeros for meta tensors."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=tree.dtype) if tree.is_meta else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(_zeros, tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map(_zeros, tree))
    if isinstance(tree, dict):
        return {key: _zeros(value) for key, value in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{name: _zeros(getattr(tree, name)) for name in tree.__dataclass_fields__})
    return tree
