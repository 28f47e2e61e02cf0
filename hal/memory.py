"""Where every byte goes: planned before anything loads, counted by purpose afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class MemoryKind(Enum):
    """The purpose of an allocation; sleep and wake act on one purpose at a time."""

    WEIGHTS = "weights"
    KV = "kv"
    WORK = "work"


@dataclass(frozen=True)
class MemoryRequest:
    """What an engine wants of a device, in bytes.

    Attributes:
        weights: bytes of packed weights.
        work: activations and staging of the largest step.
        page_bytes: bytes of one KV page; 0 for models without a cache.
        utilization: share of the device's memory that this engine may use, 0 to 1.
        kv_bytes: fixed size of the KV pool; None means all that is left.
    """

    weights: int
    work: int
    page_bytes: int
    utilization: float = 0.9
    kv_bytes: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes will go. `reserved` belongs to others: the runtime, the driver, other processes."""

    total: int
    reserved: int
    weights: int
    work: int
    kv: int
    num_pages: int
    page_bytes: int

    @property
    def free(self) -> int:
        return self.total - self.reserved - self.weights - self.work - self.kv


@dataclass(frozen=True)
class MemoryStats:
    """Bytes now in use and the highest use so far, by purpose (keys are `MemoryKind` values), and what is free."""

    used: dict[str, int]
    peak: dict[str, int]
    free: int
    total: int


class Memory(Protocol):
    """A device's memory."""

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        """Where every byte would go; allocates nothing. Raises `CapacityError` when weights and work do not fit."""
        ...

    def alloc(self, kind: MemoryKind, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised device tensor, counted under `kind` until it is garbage.

        Raises `CapacityError` with the bytes asked for and free; the device stays usable.
        """
        ...

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised host tensor, pinned where the device profits from it."""
        ...

    def stats(self) -> MemoryStats: ...

    def trim(self) -> None:
        """Return cached, unused memory to the system."""
        ...

    def release(self, kind: MemoryKind) -> None:
        """Drop the bytes behind all tensors of `kind` (sleep). Their content is lost; the tensors stay valid objects."""
        ...

    def restore(self, kind: MemoryKind) -> bool:
        """Give released tensors memory again (wake), content undefined.

        Returns whether addresses were kept; if not, every `Replay` that used them is invalid.
        """
        ...
