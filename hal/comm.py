"""Collectives between the ranks of one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

ReduceOp = Literal["sum", "max"]


@dataclass(frozen=True)
class Topology:
    """A group of ranks.

    Attributes:
        rank: this process's place, 0 ≤ rank < world.
        world: number of ranks.
        address: "host:port" where rank 0 listens.
        name: name of the group ("tp", "pp", …), unique within `address`.
        timeout_s: seconds to wait for the others.
        direct: ranks may work in each other's memory, where the device has kernels that do; otherwise its library carries everything.
    """

    rank: int
    world: int
    address: str = "127.0.0.1:0"
    name: str = "world"
    timeout_s: float = 300.0
    direct: bool = True


class Communicator(Protocol):
    """Eight collectives. Tensors lie on the device, contiguous, same shape on all ranks unless said."""

    rank: int
    world: int

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce in place over all ranks; returns `x`."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' `x` along `dim`, in rank order."""
        ...

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Sum over ranks, return this rank's slice of `dim`, whose size is a multiple of `world`."""
        ...

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Send `send[r]` rows of `x` to each rank r, return `sum(receive)` rows in rank order."""
        ...

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Overwrite `x` with the root's, in place; returns `x`."""
        ...

    def send(self, x: torch.Tensor, to: int) -> None: ...

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Fill `x` with what `source` sent; returns `x`."""
        ...

    def barrier(self) -> None: ...

    def capturable(self, op: str) -> bool:
        """Whether the collective named `op` may sit inside a captured step."""
        ...

    def close(self) -> None:
        """Leave the group and free its resources; idempotent."""
        ...


class JoinedSums(Protocol):
    """What a communicator may have besides: a sum and what follows it in one kernel."""

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(RMSNorm(Σ x + residual) · (weight + offset), Σ x + residual) in one kernel, with the bits of one after the other.

        x, residual `[T, width]`. None, with nothing done, where there is no such kernel for these: then `all_reduce` and norm.
        """
        ...


def joined_sums(group: Communicator) -> JoinedSums | None:
    """The same group, where it has them."""
    mine: Any = group
    return mine if hasattr(group, "all_reduce_add_norm") else None
