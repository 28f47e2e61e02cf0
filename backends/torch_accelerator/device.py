"""One opened device of a torch module, behind the contract."""

from __future__ import annotations

import weakref
from typing import TypeVar

import torch
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.comm import DeviceCommunicator, connect
from pagoda.backends.torch_accelerator.graphs import AcceleratorGraphs
from pagoda.backends.torch_accelerator.memory import AcceleratorMemory
from pagoda.backends.torch_accelerator.stream import AcceleratorStream
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.backends.torch_host.kv import host_layout
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy, Graphs
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.memory import Memory
from pagoda.hal.stream import Stream

T = TypeVar("T")


class AcceleratorDevice:
    """Device number `info.index` of its kind.

    Args:
        api: the torch module.
        info: facts; `GRAPHS` and `PINNED_HOST` among the features are believed.
        collectives: name of the c10d backend; None carries collectives over the host.
        policy: buckets of captured steps, where the defaults do not suit.
    """

    group_kind: type[DeviceCommunicator] = DeviceCommunicator
    """Of groups over a c10d backend."""

    def __init__(self, api: TorchApi, info: DeviceInfo, collectives: str | None, policy: GraphPolicy | None = None) -> None:
        self.info = info
        self.torch_device = torch.device(api.kind, info.index)
        self._api, self._collectives = api, collectives
        self._groups = weakref.WeakSet[DeviceCommunicator]()
        api.use(self.torch_device)
        self.memory: Memory = AcceleratorMemory(api, self.torch_device, pinned=Feature.PINNED_HOST in info.features)
        captured = Feature.GRAPHS in info.features
        self.graphs: Graphs = AcceleratorGraphs(api, self.torch_device, policy) if captured else EagerGraphs(policy)

    def stream(self) -> Stream:
        return AcceleratorStream(self._api, self.torch_device)

    def synchronize(self) -> None:
        try:
            self._api.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceError(f"work on {self.info.model} failed: {error}") from error
        for group in self._groups:
            group.notice()

    def communicator(self, topology: Topology) -> Communicator:
        group = connect(topology, self._api, self.torch_device, self._collectives, self.group_kind)
        if isinstance(group, DeviceCommunicator):
            self._groups.add(group)
        return group

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        return host_layout(group, self.memory, self.info.limits.alignment)

    def extension(self, protocol: type[T]) -> T | None:
        return None


def checked_index(kind: str, index: int, count: int) -> int:
    """`index`, where there is such a device; raises `DeviceError` otherwise."""
    if not 0 <= index < count:
        raise DeviceError(f"{kind} device {index} was asked for; there are {count}")
    return index
