"""One opened NVIDIA GPU: facts from the driver, memory counted by purpose, streams, graphs, collectives, pages."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from pagoda.backends.cuda.comm import connect
from pagoda.backends.cuda.graphs import CudaGraphs
from pagoda.backends.torch_host.kv import host_layout
from pagoda.backends.torch_host.memory import HostMemory
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import Graphs
from pagoda.hal.info import DeviceInfo, Feature, Limits
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.memory import Memory
from pagoda.hal.stream import Event, Stream

T = TypeVar("T")

PAGE_SIZES = (64, 32, 16, 128)
"""Preferred first: pages of 64 tokens are whole tiles of the attention kernels, and cost a quarter of the hashes of 16."""


class CudaMemory(HostMemory):
    """The GPU's memory; host staging is pinned."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.cuda.mem_get_info(device)[1], self._spare, device)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def _spare(self) -> int:
        """What the driver has free and what torch's allocator holds unused."""
        free = torch.cuda.mem_get_info(self._device)[0]
        return free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)


class CudaEvent:
    """A timing event of torch."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def elapsed_ms(self, other: Event) -> float:
        if not isinstance(other, CudaEvent):
            raise DeviceError(f"events of two devices cannot be compared: {type(self).__name__} and {type(other).__name__}")
        return self.event.elapsed_time(other.event)


class CudaStream:
    """A stream of torch; `with` makes it current."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._context: list[torch.cuda.StreamContext] = []

    def record(self) -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def __enter__(self) -> Self:
        self._context.append(torch.cuda.stream(self._stream))
        self._context[-1].__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.pop().__exit__(kind, error, trace)


class CudaDevice:
    """GPU number `index`."""

    def __init__(self, index: int) -> None:
        count = torch.cuda.device_count()
        if index >= count:
            raise DeviceError(f"cuda device {index} was asked for; there are {count}")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.info = _info(index)
        self.memory: Memory = CudaMemory(self.torch_device)
        self.graphs: Graphs = CudaGraphs(self.torch_device)

    def stream(self) -> Stream:
        return CudaStream(self.torch_device)

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            raise DeviceError(f"work on {self.info.model} failed: {error}") from error

    def communicator(self, topology: Topology) -> Communicator:
        return connect(topology, self.torch_device)

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        return host_layout(group, self.memory, self.info.limits.alignment)

    def extension(self, protocol: type[T]) -> T | None:
        return None


def device_infos() -> tuple[DeviceInfo, ...]:
    """Facts of every GPU; empty on any trouble."""
    try:
        return tuple(_info(index) for index in range(torch.cuda.device_count()))
    except RuntimeError:
        return ()


def _info(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    features = {Feature.GRAPHS, Feature.PINNED_HOST, Feature.TRITON, Feature.INT8, Feature.FLOAT64}
    dtypes = {"float64", "float32", "float16"}
    if properties.major >= 8:
        dtypes.add("bfloat16")
    if (properties.major, properties.minor) >= (8, 9):
        features.add(Feature.FP8)
        dtypes |= {"float8_e4m3fn", "float8_e5m2"}
    if properties.major >= 10:
        features.add(Feature.FP4)
    if torch.cuda.device_count() > 1:
        features.add(Feature.P2P)
    return DeviceInfo(
        vendor="nvidia",
        model=properties.name,
        arch=f"sm{properties.major}{properties.minor}",
        index=index,
        memory_bytes=properties.total_memory,
        dtypes=frozenset(dtypes),
        features=frozenset(features),
        limits=Limits(properties.shared_memory_per_block_optin, properties.max_threads_per_block, 256, PAGE_SIZES),
        driver=_driver(),
    )


def _driver() -> str:
    """Versions of the driver's kernel module and of the CUDA that torch was built with."""
    module = Path("/proc/driver/nvidia/version")
    words = module.read_text().split() if module.exists() else []
    version = next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    return f"{version}, CUDA {torch.version.cuda}"
