"""Collectives over gloo, without torch's global default group, so that several groups live in one process."""

from __future__ import annotations

import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pagoda.backends.torch_host.group import GroupCommunicator
from pagoda.hal.comm import Communicator, ReduceOp, Topology
from pagoda.hal.errors import DeviceError

_dist: Any = dist  # the stubs know these classes only in part
_gloo = _dist.ProcessGroupGloo
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def connect(topology: Topology) -> Communicator:
    """Join the group; blocks until all ranks have joined. Raises `DeviceError` when they do not."""
    return LoneCommunicator() if topology.world == 1 else GlooCommunicator(topology)


class LoneCommunicator:
    """A group of one: every collective is the identity."""

    rank = 0
    world = 1

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        raise DeviceError(f"a send to rank {to} in a group of one; only other ranks can receive")

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        raise DeviceError(f"a receive from rank {source} in a group of one; only other ranks can send")

    def barrier(self) -> None:
        return None

    def capturable(self, op: str) -> bool:
        return True

    def close(self) -> None:
        return None


class GlooCommunicator(GroupCommunicator):
    """A group of two ranks or more.

    Args:
        topology: who we are and where rank 0 listens; several names may share an address if rank 0 of all is the same process.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._group = self._join(topology)
        # gloo's threads must be gone before the interpreter is, else the process aborts.
        self._closer = weakref.finalize(self, _shutdown, self._group)
        self.barrier()

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gathered = [torch.empty_like(x) for _ in range(self.world)]
        self._do("all_gather", lambda: self._group.allgather([gathered], [x]))
        return torch.cat(gathered, dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self._divisible(x, dim)
        total = self.all_reduce(x.clone())
        return total.chunk(self.world, dim=dim)[self.rank].contiguous()

    def barrier(self) -> None:
        self._do("barrier", lambda: self._group.barrier())

    def capturable(self, op: str) -> bool:
        return True  # a replay here runs the step again, collectives included

    def close(self) -> None:
        self._closer()

    def _closed(self) -> bool:
        return not self._closer.alive

    def _join(self, topology: Topology) -> Any:
        host, _, port = topology.address.rpartition(":")
        patience = timedelta(seconds=topology.timeout_s)
        try:
            if topology.rank > 0:
                _await_listener(host, int(port), topology.timeout_s)
            store = open_store(topology)
            options = _gloo._Options()
            options._timeout = patience
            device = _gloo.create_device(hostname=host) if host in _LOOPBACK else _gloo.create_default_device()
            options._devices = [device]
            return _gloo(_dist.PrefixStore(topology.name, store), topology.rank, topology.world, options)
        except (RuntimeError, ValueError, OSError) as error:
            raise DeviceError(
                f"rank {topology.rank} of {topology.world} could not join group {topology.name!r} at {topology.address}"
                f" within {topology.timeout_s:g} s: {error}; check that every rank started and that the address is reachable"
            ) from error


def open_store(topology: Topology) -> Any:
    """The key-value store of the group's address; rank 0 serves it."""
    host, _, port = topology.address.rpartition(":")
    patience = timedelta(seconds=topology.timeout_s)
    return _dist.TCPStore(host, int(port), None, topology.rank == 0, patience, wait_for_workers=False, multi_tenant=True)


def _await_listener(host: str, port: int, timeout_s: float) -> None:
    """Return when rank 0 listens. torch waits as well, but prints a page of C++ frames when nobody comes."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except ConnectionRefusedError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _shutdown(group: Any) -> None:
    group.shutdown()
