"""A device whose memory is the host's: what `cpu` and `reference` open."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from pagoda.backends.torch_host.comm import connect
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.backends.torch_host.kv import host_layout
from pagoda.backends.torch_host.memory import HostMemory
from pagoda.backends.torch_host.stream import HostStream
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.graphs import Graphs
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.memory import Memory
from pagoda.hal.stream import Stream

T = TypeVar("T")


class HostDevice:
    """CPU torch behind the contract.

    Args:
        info: its facts.
        available: bytes that the system could still give now.
        graphs: how steps are made executable.
    """

    def __init__(self, info: DeviceInfo, available: Callable[[], int], graphs: Graphs | None = None) -> None:
        self.info = info
        self.torch_device = torch.device("cpu")
        self.memory: Memory = HostMemory(info.memory_bytes, available, self.torch_device)
        self.graphs: Graphs = graphs or EagerGraphs()

    def stream(self) -> Stream:
        return HostStream()

    def synchronize(self) -> None:
        return None

    def communicator(self, topology: Topology) -> Communicator:
        return connect(topology)

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        return host_layout(group, self.memory, self.info.limits.alignment)

    def extension(self, protocol: type[T]) -> T | None:
        return None
