"""How the ranks of an engine are arranged: `Mesh`, whose axes name the groups that talk to each other.

Axes from the outermost in: pipeline (pp), data (dp), prefill context (pcp), decode context (dcp), expert (ep), tensor (tp).
Ranks that differ in one axis only form a group of that axis; neighbours in tp are neighbours in rank, since they talk most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pagoda.hal.comm import Topology
from pagoda.hal.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Ranks along each axis; all ≥ 1. `world` is their product. Raises `ConfigError` naming an axis below 1."""

    pp: int = 1
    dp: int = 1
    pcp: int = 1
    dcp: int = 1
    ep: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, size in self._sizes():
            if size < 1:
                raise ConfigError(f"the mesh has {axis}={size}; every axis needs at least one rank")

    @property
    def world(self) -> int:
        world = 1
        for _, size in self._sizes():
            world *= size
        return world

    def place(self, rank: int) -> dict[str, int]:
        """Axis → the rank's place along it. Raises `ConfigError` for a rank outside the mesh."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is outside a mesh of {self.world} ranks; ranks count from 0")
        places = {}
        for axis, size in reversed(self._sizes()):
            rank, places[axis] = divmod(rank, size)
        return places

    def rank(self, **places: int) -> int:
        """The rank at these places; axes left out are 0. The inverse of `place`."""
        rank = 0
        for axis, size in self._sizes():
            rank = rank * size + places.get(axis, 0)
        return rank

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks of `rank`'s group along `axis`, in order, itself included."""
        places = self.place(rank)
        return tuple(self.rank(**{**places, axis: at}) for at in range(dict(self._sizes())[axis]))

    def topology(self, rank: int, axis: str, address: str) -> Topology:
        """What to hand to `Device.communicator` for `rank`'s group along `axis`; groups of an axis differ in name."""
        peers = self.peers(rank, axis)
        return Topology(peers.index(rank), len(peers), address, f"{axis}.{peers[0]}")

    def _sizes(self) -> list[tuple[str, int]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]
