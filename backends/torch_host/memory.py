"""Memory of a device that is the host: plans against what the system has free, counts every allocation by purpose, sleeps and wakes."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from pagoda.hal import heap
from pagoda.hal.errors import CapacityError
from pagoda.hal.memory import MemoryKind, MemoryPlan, MemoryRequest, MemoryStats


@dataclass
class _Held:
    """One live allocation. `released` says that its bytes were given back while its tensors live on."""

    kind: MemoryKind
    nbytes: int
    storage: weakref.ref[torch.UntypedStorage]
    released: bool = field(default=False)


class HostMemory:
    """Counted CPU memory.

    Args:
        total: bytes that may be used in all.
        available: bytes that the system could still give now.
        device: where tensors are made.
    """

    def __init__(self, total: int, available: Callable[[], int], device: torch.device) -> None:
        self._total = total
        self._available = available
        self._device = device
        self._held: dict[int, _Held] = {}
        self._numbers = itertools.count()
        # Garbage is collected in whatever thread, also in the middle of counting: hence re-entrant.
        self._lock = threading.RLock()
        self._used = dict.fromkeys(MemoryKind, 0)
        self._peak = dict.fromkeys(MemoryKind, 0)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        mine = sum(self._used.values())
        budget = min(int(self._total * request.utilization), self._available() + mine)
        left = budget - request.weights - request.work
        wanted = left if request.kv_bytes is None else request.kv_bytes
        if left < 0 or wanted > left:
            self._refuse_plan(request, budget, max(0, wanted))
        pages = wanted // request.page_bytes if request.page_bytes else 0
        return MemoryPlan(
            total=self._total,
            reserved=self._total - budget,
            weights=request.weights,
            work=request.work,
            kv=pages * request.page_bytes,
            num_pages=pages,
            page_bytes=request.page_bytes,
        )

    def alloc(self, kind: MemoryKind, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        free = self._free()
        if nbytes > free:
            raise self._exhausted(kind, nbytes, free)
        try:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        except (RuntimeError, MemoryError) as error:
            raise self._exhausted(kind, nbytes, free) from error
        self._count(kind, nbytes, tensor)
        return tensor

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def stats(self) -> MemoryStats:
        return MemoryStats(
            used={kind.value: self._used[kind] for kind in MemoryKind},
            peak={kind.value: self._peak[kind] for kind in MemoryKind},
            free=self._free(),
            total=self._total,
        )

    def trim(self) -> None:
        heap.trim()

    def release(self, kind: MemoryKind) -> None:
        for held, storage in self._of(kind):
            if not held.released:
                storage.resize_(0)
                held.released = True
                self._add(kind, -held.nbytes)
        self.trim()

    def restore(self, kind: MemoryKind) -> bool:
        asleep = [(held, storage) for held, storage in self._of(kind) if held.released]
        nbytes, free = sum(held.nbytes for held, _ in asleep), self._free()
        if nbytes > free:
            raise self._exhausted(kind, nbytes, free)
        for held, storage in asleep:
            storage.resize_(held.nbytes)
            held.released = False
            self._add(kind, held.nbytes)
        return not asleep

    def _count(self, kind: MemoryKind, nbytes: int, tensor: torch.Tensor) -> None:
        storage, number = tensor.untyped_storage(), next(self._numbers)
        self._held[number] = _Held(kind, nbytes, weakref.ref(storage))
        weakref.finalize(storage, self._forget, number).atexit = False
        self._add(kind, nbytes)

    def _forget(self, number: int) -> None:
        held = self._held.pop(number)
        if not held.released:
            self._add(held.kind, -held.nbytes)

    def _add(self, kind: MemoryKind, nbytes: int) -> None:
        with self._lock:
            self._used[kind] += nbytes
            self._peak[kind] = max(self._peak[kind], self._used[kind])

    def _of(self, kind: MemoryKind) -> list[tuple[_Held, torch.UntypedStorage]]:
        found = [(held, held.storage()) for held in list(self._held.values()) if held.kind is kind]
        return [(held, storage) for held, storage in found if storage is not None]

    def _free(self) -> int:
        # Untouched pages cost the system nothing yet, so what was handed out bounds it as well as what the system reports.
        return max(0, min(self._total - sum(self._used.values()), self._available()))

    def _exhausted(self, kind: MemoryKind, nbytes: int, free: int) -> CapacityError:
        used = ", ".join(f"{k.value} {count:,}" for k, count in self._used.items())
        message = f"{nbytes:,} bytes of {kind.value} were asked for, {free:,} of {self._total:,} are free (in use: {used})"
        return CapacityError(f"{message}; ask for less or free other memory", asked=nbytes, available=free)

    def _refuse_plan(self, request: MemoryRequest, budget: int, kv: int) -> None:
        asked = request.weights + request.work + kv
        wanted = f"weights {request.weights:,} + work {request.work:,} + KV {kv:,} = {asked:,} bytes"
        there = (
            f"{budget:,} of {self._total:,} bytes may be used (utilization {request.utilization:g}, {self._available():,} available now)"
        )
        advice = "use a smaller model, KV pool or token budget, or raise the utilization"
        raise CapacityError(f"{wanted} do not fit: {there}; {advice}", asked=asked, available=budget)
