"""Collectives of a chip that is alone: each is the identity."""

from __future__ import annotations

import torch
from pagoda.hal.comm import ReduceOp
from pagoda.hal.errors import DeviceError


class GroupOfOne:
    """Rank 0 of 1."""

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
        raise DeviceError("there is nobody else in a group of one")

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        raise DeviceError("there is nobody else in a group of one")

    def barrier(self) -> None:
        return None

    def capturable(self, op: str) -> bool:
        return op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")

    def close(self) -> None:
        return None
