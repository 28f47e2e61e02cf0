"""Collectives of a device: by the c10d backend that its vendor registers, or carried over the host where there is none."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.peers import Peers
from pagoda.backends.torch_host.comm import GlooCommunicator, LoneCommunicator, open_store
from pagoda.backends.torch_host.group import GroupCommunicator
from pagoda.hal.comm import Communicator, ReduceOp, Topology
from pagoda.hal.errors import DeviceError

_dist: Any = dist  # the stubs know its classes only in part
CLASSES = {"nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
"""Backends that torch itself brings; others are registered by the vendor's package."""


def connect(
    topology: Topology, api: TorchApi, device: torch.device, backend: str | None, kind: type[DeviceCommunicator] | None = None
) -> Communicator:
    """Join the group; blocks until all ranks have joined. Raises `DeviceError` when they do not. `kind`: of groups over `backend`."""
    if topology.world == 1:
        return LoneCommunicator()
    return HostCarriedCommunicator(topology) if backend is None else (kind or DeviceCommunicator)(topology, api, device, backend)


class DeviceCommunicator(GroupCommunicator):
    """A group of two devices or more, one process each, over a c10d backend whose collectives are ordered by streams.

    When a rank is lost what waits for it on the device is given up. The next who waits for the device is told so (`notice`), and whoever
    wants another collective.
    """

    def __init__(self, topology: Topology, api: TorchApi, device: torch.device, backend: str) -> None:
        super().__init__(topology)
        self._api, self._device = api, device
        self._loss, self._noticed = "", False
        self._group: Any = None
        self._store: Any = None
        self._join(topology, backend)
        self.barrier()

    def notice(self) -> None:
        """Raises `DeviceError` where a rank was lost and nobody has been told."""
        if self._loss and not self._noticed:
            self._check()

    def _check(self) -> None:
        if self._loss:
            self._noticed = True
            raise DeviceError(f"group {self._name!r} is no more on rank {self.rank}: {self._loss}")

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        flat = x.new_empty((self.world, *x.shape))
        self._do("all_gather", lambda: self._group._allgather_base(flat.flatten(0, 1) if x.dim() else flat, x.contiguous()))
        return torch.cat(flat.unbind(0), dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self._divisible(x, dim)
        parts = torch.stack(x.chunk(self.world, dim=dim))
        out = torch.empty_like(parts[0])
        self._do("reduce_scatter", lambda: self._group._reduce_scatter_base(out, parts))
        return out

    def barrier(self) -> None:
        super().all_reduce(torch.zeros(1, device=self._device))
        self._api.synchronize(self._device)

    def capturable(self, op: str) -> bool:
        return op != "barrier" and self._api.can_capture()

    def close(self) -> None:
        if self._group is not None:
            self._peers.close()
            if not self._loss:
                self._group.shutdown()
            self._group = None

    def _closed(self) -> bool:
        return self._group is None

    def _do(self, op: str, start: Callable[[], Any]) -> None:
        self._check()
        super()._do(op, start)

    def _lose(self, why: str) -> None:
        self._loss = why
        if self._group is not None:
            self._group.abort()

    def _join(self, topology: Topology, backend: str) -> None:
        lose = weakref.WeakMethod(self._lose)
        try:
            store = _dist.PrefixStore(topology.name, open_store(topology))
            self._store = store
            self._group = make_group(backend, store, topology.rank, topology.world, timedelta(seconds=topology.timeout_s))
            self._peers = Peers(topology, store, lambda why: (there := lose()) and there(why))
        except (RuntimeError, ValueError, OSError) as error:
            raise DeviceError(
                f"rank {topology.rank} of {topology.world} could not join group {topology.name!r} at {topology.address}: {error};"
                " check that every rank started and that the address is reachable"
            ) from error


def make_group(backend: str, store: Any, rank: int, world: int, patience: timedelta) -> Any:
    """A process group of c10d's backend of that name, outside torch's global groups. Raises `DeviceError` where there is none."""
    kind = getattr(dist, CLASSES.get(backend, ""), None)
    if kind is not None:
        # A loss is noticed here; torch would end the whole process over it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = kind.Options()
        options._timeout = patience
        return kind(store, rank, world, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise DeviceError(f"torch.distributed has no backend {backend!r} here; install the vendor's torch package that registers it")
    return plugin.creator_fn(store, rank, world, patience)


class HostCarriedCommunicator:
    """Collectives over gloo: tensors are copied to the host, and their results back. Never inside a captured step."""

    def __init__(self, topology: Topology) -> None:
        self._host = GlooCommunicator(topology)
        self.rank, self.world = topology.rank, topology.world

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return x.copy_(self._host.all_reduce(x.cpu(), op))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self._host.all_gather(x.cpu(), dim).to(x.device)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._host.reduce_scatter(x.cpu(), dim).to(x.device)

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return self._host.all_to_all(x.cpu(), send, receive).to(x.device)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return x.copy_(self._host.broadcast(x.cpu(), root))

    def send(self, x: torch.Tensor, to: int) -> None:
        self._host.send(x.cpu(), to)

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self._host.recv(torch.empty(x.shape, dtype=x.dtype), source))

    def barrier(self) -> None:
        self._host.barrier()

    def capturable(self, op: str) -> bool:
        return False

    def close(self) -> None:
        self._host.close()
