"""The mesh: places and ranks are inverse, groups partition the world, each group is one communicator."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagoda.hal.discovery import find
from pagoda.hal.errors import ConfigError
from pagoda.models.parallel.mesh import Mesh

AXES = ("pp", "dp", "pcp", "dcp", "ep", "tp")
meshes = st.builds(Mesh, **{axis: st.integers(1, 3) for axis in AXES})


@given(meshes)
def test_places_and_ranks_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(**mesh.place(rank)) for rank in range(mesh.world)] == list(range(mesh.world))


@given(meshes, st.sampled_from(AXES))
def test_the_groups_of_an_axis_partition_the_world(mesh: Mesh, axis: str) -> None:
    groups = {mesh.peers(rank, axis) for rank in range(mesh.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    assert {len(group) for group in groups} == {getattr(mesh, axis)}


def test_tensor_peers_are_neighbours() -> None:
    assert Mesh(pp=2, tp=4).peers(5, "tp") == (4, 5, 6, 7)
    assert Mesh(pp=2, tp=4).peers(5, "pp") == (1, 5)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp=0"):
        Mesh(tp=0)
    with pytest.raises(ConfigError, match="rank 2"):
        Mesh(tp=2).place(2)


def test_each_group_adds_up_its_own_ranks() -> None:
    mesh, device = Mesh(dp=2, tp=2), find("cpu").open(0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"

    def both(rank: int) -> tuple[float, float]:
        sums = []
        for axis in ("tp", "dp"):
            group = device.communicator(mesh.topology(rank, axis, address))
            sums.append(group.all_reduce(torch.tensor([float(rank)])).item())
            group.close()
        return sums[0], sums[1]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(both, range(4))) == [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]
