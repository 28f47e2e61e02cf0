"""One opened TPU, behind the contract."""

from __future__ import annotations

from typing import TypeVar

from pagoda.backends.torch_accelerator.comm import HostCarriedCommunicator
from pagoda.backends.torch_host.comm import LoneCommunicator
from pagoda.backends.torch_host.kv import host_layout
from pagoda.backends.tpu.graphs import TracedSteps
from pagoda.backends.tpu.memory import TpuMemory
from pagoda.backends.tpu.runtime import Runtime
from pagoda.backends.tpu.stream import TpuStream
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import Graphs
from pagoda.hal.info import DeviceInfo
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.memory import Memory
from pagoda.hal.stream import Stream

T = TypeVar("T")


class TpuDevice:
    """Device number `info.index` of the runtime."""

    def __init__(self, runtime: Runtime, info: DeviceInfo) -> None:
        self.info = info
        self.runtime = runtime
        self.torch_device = runtime.device(info.index)
        self.memory: Memory = TpuMemory(runtime, info, self.torch_device)
        self.graphs: Graphs = TracedSteps(runtime)

    def stream(self) -> Stream:
        return TpuStream(self.runtime)

    def synchronize(self) -> None:
        try:
            self.runtime.run(wait=True)
            self.runtime.wait()
        except RuntimeError as error:
            raise DeviceError(f"work on {self.info.model} failed: {error}") from error

    def communicator(self, topology: Topology) -> Communicator:
        return LoneCommunicator() if topology.world == 1 else HostCarriedCommunicator(topology)

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        return host_layout(group, self.memory, self.info.limits.alignment)

    def extension(self, protocol: type[T]) -> T | None:
        return self.runtime if protocol is Runtime else None  # type: ignore[return-value]
