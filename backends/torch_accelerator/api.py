"""What a torch device module offers, found by looking: names differ from vendor to vendor, what they mean does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from pagoda.hal.errors import DeviceError

GRAPH_CLASSES = ("CUDAGraph", "XPUGraph", "NPUGraph", "HPUGraph", "Graph")


class TorchApi:
    """The device module of one torch device type (`torch.cuda`, `torch.xpu`, `torch.mps`, a plugin's own).

    Args:
        kind: torch's device type; its module must be there, so the vendor's package is imported already.

    Raises `DeviceError` where torch has no such module.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        try:
            self.module: Any = torch.get_device_module(kind)
        except RuntimeError as error:
            raise DeviceError(
                f"torch {torch.__version__} has no device module {kind!r}: {error}; import the vendor's package first"
            ) from error
        self.graph_class: Any = next((getattr(self.module, name) for name in GRAPH_CLASSES if hasattr(self.module, name)), None)

    def has(self, *names: str) -> bool:
        return all(hasattr(self.module, name) for name in names)

    def count(self) -> int:
        return int(self.module.device_count())

    def use(self, device: torch.device) -> None:
        """Make it the process's device of this type, where a process can have several."""
        if self.has("set_device"):
            self.module.set_device(device)

    def synchronize(self, device: torch.device) -> None:
        takes_device = bool(signature(self.module.synchronize).parameters)
        self.module.synchronize(device) if takes_device else self.module.synchronize()

    def stream(self, device: torch.device) -> Any | None:
        """A new stream, or None where the module has a single one."""
        return self.module.Stream(device) if self.has("Stream", "stream") else None

    def within(self, stream: Any | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else self.module.stream(stream)

    def current_stream(self, device: torch.device) -> Any:
        takes_device = bool(signature(self.module.current_stream).parameters)
        return self.module.current_stream(device) if takes_device else self.module.current_stream()

    def event(self) -> Any:
        return self.module.Event(enable_timing=True)

    def free_and_total(self, device: torch.device) -> tuple[int, int]:
        """Bytes that the driver has free, and has in all."""
        if self.has("mem_get_info"):
            free, total = self.module.mem_get_info(device)
            return int(free), int(total)
        if self.has("recommended_max_memory", "driver_allocated_memory"):
            total = int(self.module.recommended_max_memory())
            return max(0, total - int(self.module.driver_allocated_memory())), total
        raise DeviceError(f"torch.{self.kind} tells no memory sizes (no mem_get_info); this torch is too old for it")

    def held_unused(self, device: torch.device) -> int:
        """Bytes that torch's allocator holds and nobody uses, and that the driver does not count as free."""
        if self.has("memory_reserved", "memory_allocated"):
            used = int(self.module.memory_allocated(device))
            free, total = self.free_and_total(device)
            # torch.hpu calls all of the device reserved, and free what no tensor uses.
            return max(0, min(int(self.module.memory_reserved(device)), total - free) - used)
        if self.has("driver_allocated_memory", "current_allocated_memory"):
            return int(self.module.driver_allocated_memory()) - int(self.module.current_allocated_memory())
        return 0

    def reserved(self, device: torch.device) -> int:
        return int(self.module.memory_reserved(device)) if self.has("memory_reserved") else 0

    def empty_cache(self) -> None:
        if self.has("empty_cache"):
            self.module.empty_cache()

    def can_capture(self) -> bool:
        return self.graph_class is not None and self.has("graph")

    def pools(self) -> bool:
        """Whether captures may share memory."""
        return self.has("graph_pool_handle")

    def capture(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """Record into `graph`. Other threads may go on using the device where the module can tell them apart."""
        begin: Callable[..., AbstractContextManager[Any]] = self.module.graph
        told = {"capture_error_mode": "thread_local"} if "capture_error_mode" in signature(begin).parameters else {}
        return begin(graph, **({"pool": pool} if pool is not None else {}), **told)
