"""Devices that are not here, for torch's fake tensors: where they would be, and a guard against whatever leaves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.backends.torch_host.kv import host_layout
from pagoda.hal.discovery import find
from pagoda.hal.kernel import Kernel
from pagoda.hal.kv import CacheGroup
from pagoda.hal.memory import MemoryKind
from pagoda.ops.references import portable_kernels, reference_kernels
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {"cuda": "cuda", "xpu": "xpu", "mps": "metal"}
"""torch's device type → the backend."""


class Elsewhere:
    """A device that is not here, as far as tensors go."""

    def __init__(self, kind: str) -> None:
        self.torch_device = torch.device(kind, 0)
        self.info = find(KINDS[kind]).describe(None)
        self.memory = self
        self.graphs = EagerGraphs()

    def alloc(self, kind: MemoryKind, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def kv_layout(self, group: CacheGroup) -> Any:
        return host_layout(group, self.memory, 64)  # type: ignore[arg-type]

    def extension(self, protocol: type[Any]) -> None:
        """It has none."""

    def kernels(self) -> tuple[Kernel, ...]:
        """What its table has in plain torch: kernels that are compiled cannot take tensors without bytes."""
        own = [one for one in find(KINDS[self.torch_device.type]).kernels() if one.name == "torch"]
        return (*own, *reference_kernels(), *portable_kernels())


class NoTrips(TorchDispatchMode):
    """Refuses every operator that touches another device; numbers of no dimension may come from the host."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.seen = kind, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor) and x.dim() and x.device.type != self.kind:
                raise AssertionError(f"{func} touches {x.device} in a step on {self.kind}")
        self.seen += 1
        return result


def watched(trips: NoTrips, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with trips:
            return call(*args)

    return run
