"""A gigabyte of paper, counted by purpose."""

from __future__ import annotations

import math
import weakref

import torch
from pagoda.hal.errors import CapacityError
from pagoda.hal.memory import MemoryKind, MemoryPlan, MemoryRequest, MemoryStats


class PaperMemory:
    """Counts what is handed out, and takes it back for a while on demand."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live: dict[int, tuple[MemoryKind, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._asleep: set[int] = set()
        self._peak = dict.fromkeys((kind.value for kind in MemoryKind), 0)

    def plan(self, request: MemoryRequest) -> MemoryPlan:
        budget = int(self._total * request.utilization)
        left = budget - request.weights - request.work
        kv = left if request.kv_bytes is None else request.kv_bytes
        if left < 0 or kv > left:
            asked = request.weights + request.work + max(kv, 0)
            raise CapacityError(f"{asked:,} bytes were asked for, {budget:,} may be used", asked=asked, available=budget)
        pages = kv // request.page_bytes if request.page_bytes else 0
        used = pages * request.page_bytes
        return MemoryPlan(self._total, self._total - budget, request.weights, request.work, used, pages, request.page_bytes)

    def alloc(self, kind: MemoryKind, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self._make_room(math.prod(shape) * dtype.itemsize)
        tensor = torch.empty(shape, dtype=dtype)
        storage = tensor.untyped_storage()
        number = id(storage)
        self._live[number] = (kind, tensor.nbytes, weakref.ref(storage))
        weakref.finalize(storage, self._forget, number).atexit = False
        self._peak[kind.value] = max(self._peak[kind.value], self._used()[kind.value])
        return tensor

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def stats(self) -> MemoryStats:
        used = self._used()
        return MemoryStats(used, dict(self._peak), self._total - sum(used.values()), self._total)

    def trim(self) -> None:
        return None

    def release(self, kind: MemoryKind) -> None:
        for number, (held, _, storage) in list(self._live.items()):
            if held is kind and (alive := storage()) is not None:
                alive.resize_(0)
                self._asleep.add(number)

    def restore(self, kind: MemoryKind) -> bool:
        waking = [number for number in self._asleep if self._live[number][0] is kind]
        self._make_room(sum(self._live[number][1] for number in waking))
        for number in waking:
            _, nbytes, storage = self._live[number]
            if (alive := storage()) is not None:
                alive.resize_(nbytes)
            self._asleep.discard(number)
        return not waking

    def _make_room(self, nbytes: int) -> None:
        free = self.stats().free
        if nbytes > free:
            raise CapacityError(f"{nbytes:,} bytes were asked for, {free:,} are free", asked=nbytes, available=free)

    def _forget(self, number: int) -> None:
        del self._live[number]
        self._asleep.discard(number)

    def _used(self) -> dict[str, int]:
        used = {kind.value: 0 for kind in MemoryKind}
        for number, (kind, nbytes, _) in self._live.items():
            used[kind.value] += 0 if number in self._asleep else nbytes
        return used
