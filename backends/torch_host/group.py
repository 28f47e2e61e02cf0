"""What collectives over any c10d process group share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pagoda.hal.comm import ReduceOp, Topology
from pagoda.hal.errors import DeviceError

_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class GroupCommunicator:
    """The collectives that are alike on every process group; a subclass sets `_group` and adds the rest."""

    _group: Any

    def __init__(self, topology: Topology) -> None:
        self.rank, self.world = topology.rank, topology.world
        self._name = topology.name

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        self._do("all_reduce", lambda: self._group.allreduce([x], options))
        return x

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

    def _closed(self) -> bool:
        raise NotImplementedError

    def _divisible(self, x: torch.Tensor, dim: int) -> None:
        if x.shape[dim] % self.world:
            raise DeviceError(f"reduce_scatter over dimension {dim} of {tuple(x.shape)}: its size must be a multiple of {self.world}")

    def _do(self, op: str, start: Callable[[], Any]) -> None:
        if self._closed():
            raise DeviceError(f"{op} on group {self._name!r}, which was closed")
        try:
            start().wait()
        except RuntimeError as error:
            raise DeviceError(f"{op} failed on rank {self.rank} of {self.world} in group {self._name!r}: {error}") from error
