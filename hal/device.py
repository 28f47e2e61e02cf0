"""The vendor's side of the contract: `Backend` finds and opens a `Device`; a device hands back things, never class names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.graphs import Graphs
from pagoda.hal.info import DeviceInfo, Probe
from pagoda.hal.kernel import Kernel
from pagoda.hal.kv import CacheGroup, KVLayout
from pagoda.hal.memory import Memory
from pagoda.hal.stream import Stream

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@runtime_checkable
class Device(Protocol):
    """One opened device.

    Attributes:
        info: its facts.
        torch_device: where tensors live.
        memory: allocation, statistics, plans.
        graphs: how a step is captured and which sizes are captured.
    """

    info: DeviceInfo
    torch_device: torch.device
    memory: Memory
    graphs: Graphs

    def stream(self) -> Stream:
        """A new stream of work; order against others through events."""
        ...

    def synchronize(self) -> None:
        """Wait until all work submitted to this device is done; raises `DeviceError` if some failed."""
        ...

    def communicator(self, topology: Topology) -> Communicator:
        """Join the ranks of `topology`; blocks until all have joined; raises `DeviceError` on a time-out."""
        ...

    def kv_layout(self, group: CacheGroup) -> KVLayout:
        """How pages of `group` lie in this device's memory."""
        ...

    def extension(self, protocol: type[T]) -> T | None:
        """An optional extra interface (profiler, peer handles, virtual memory), or None: the base never widens for one vendor."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One vendor. Found through the entry-point group `pagoda.backends`, built-in or not.

    Attributes:
        name: short id, the value of `--device`.
        contract: `CONTRACT_VERSION` it was written for.
    """

    name: str
    contract: int

    def probe(self) -> Probe:
        """Here or not. Never raises, never starts a driver (safe before fork), imports no vendor package."""
        ...

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices that are here; empty on any trouble."""
        ...

    def open(self, index: int = 0) -> Device:
        """Open a device; the only call that may import or initialise vendor code. Raises `DeviceError`."""
        ...

    def describe(self, model: str | None = None) -> DeviceInfo:
        """Facts of a device model that may be absent, from the backend's data file; None means the default model.

        Raises `DeviceError` naming the known models.
        """
        ...

    def kernels(self) -> Iterable[Kernel]:
        """Import-free records of every kernel this backend offers beyond the references."""
        ...


@runtime_checkable
class Spread(Protocol):
    """Extension of a device that is several chips behind one program: its tensors are seen whole, and lie in parts on the chips.

    Where they lie changes no result. Collectives are put in by the device's compiler; the engine has one rank.
    """

    def lay(self, tensor: torch.Tensor, dim: int | None) -> None:
        """Part a device tensor over the chips along `dim`; whole on each where `dim` is None, absent, or shorter than their number."""
        ...


@runtime_checkable
class Spreads(Protocol):
    """A backend that opens several chips as one device: one process drives them all, so they are no ranks."""

    def open_spread(self, index: int, chips: int) -> Device:
        """The chips from `index` on as one device, with the extension `Spread`. Raises `DeviceError` where they are fewer."""
        ...


@runtime_checkable
class Describes(Protocol):
    """A backend that says which device models it can describe."""

    def described(self) -> tuple[DeviceInfo, ...]:
        """Facts of each of them, whether it is here or not."""
        ...


@runtime_checkable
class StandsIn(Protocol):
    """A backend that can play any device that another one describes: what `plan` opens for hardware that is not here."""

    def stand_in(self, info: DeviceInfo) -> Device:
        """A device with these facts that computes nothing."""
        ...
