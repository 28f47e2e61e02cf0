"""Collectives over NCCL, without torch's global default group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pagoda.backends.torch_host.comm import LoneCommunicator
from pagoda.hal.comm import Communicator, ReduceOp, Topology
from pagoda.hal.errors import DeviceError

_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def connect(topology: Topology, device: torch.device) -> Communicator:
    """Join the group; blocks until all ranks have joined. Raises `DeviceError` when they do not."""
    return LoneCommunicator() if topology.world == 1 else NcclCommunicator(topology, device)


class NcclCommunicator:
    """A group of two GPUs or more, one process each."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.rank, self.world = topology.rank, topology.world
        self._device = device
        self._name = topology.name
        self._group = self._join(topology)
        self.barrier()

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        self._do("all_reduce", lambda: self._group.allreduce([x], options))
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        flat = x.new_empty((self.world, *x.shape))
        self._do("all_gather", lambda: self._group._allgather_base(flat.flatten(0, 1) if x.dim() else flat, x.contiguous()))
        return torch.cat(flat.unbind(0), dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if x.shape[dim] % self.world:
            raise DeviceError(f"reduce_scatter over dimension {dim} of {tuple(x.shape)}: its size must be a multiple of {self.world}")
        parts = torch.stack(x.chunk(self.world, dim=dim))
        out = torch.empty_like(parts[0])
        self._do("reduce_scatter", lambda: self._group._reduce_scatter_base(out, parts))
        return out

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self._do("all_to_all", lambda: self._group.alltoall_base(out, x, receive, send))
        return out

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._do("broadcast", lambda: self._group.broadcast([x], options))
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        self._do("send", lambda: self._group.send([x], to, 0))

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        self._do("recv", lambda: self._group.recv([x], source, 0))
        return x

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self._device))
        torch.cuda.synchronize(self._device)

    def capturable(self, op: str) -> bool:
        return op != "barrier"

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None

    def _join(self, topology: Topology) -> Any:
        host, _, port = topology.address.rpartition(":")
        patience = timedelta(seconds=topology.timeout_s)
        try:
            store = dist.TCPStore(host, int(port), None, topology.rank == 0, patience, wait_for_workers=False, multi_tenant=True)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            return dist.ProcessGroupNCCL(dist.PrefixStore(topology.name, store), topology.rank, topology.world, options)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"rank {topology.rank} of {topology.world} could not join group {topology.name!r} at {topology.address}: {error};"
                " check that every rank started and that the address is reachable"
            ) from error

    def _do(self, op: str, start: Callable[[], Any]) -> None:
        if self._group is None:
            raise DeviceError(f"{op} on group {self._name!r}, which was closed")
        try:
            start().wait()
        except RuntimeError as error:
            raise DeviceError(f"{op} failed on rank {self.rank} of {self.world} in group {self._name!r}: {error}") from error
