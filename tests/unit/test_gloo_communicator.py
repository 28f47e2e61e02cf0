"""Collectives: a group of one, and two processes in two groups at once."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp
from pagoda.hal.comm import Communicator, Topology
from pagoda.hal.discovery import find
from pagoda.hal.errors import DeviceError


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def join(rank: int, port: int, name: str, timeout_s: float = 60) -> Communicator:
    return find("cpu").open().communicator(Topology(rank, 2, f"127.0.0.1:{port}", name, timeout_s))


def all_of_them(rank: int, port: int) -> None:
    group, other = join(rank, port, "tp"), join(rank, port, "ep")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((4, 6), rank + 1, dtype=dtype)
        assert (group.all_reduce(x.clone()) == 3).all()
        assert (other.all_reduce(x.clone(), "max") == 2).all()
        assert group.all_gather(x, dim=-1)[0].tolist() == [1] * 6 + [2] * 6
        assert group.all_gather(x, dim=0)[:, 0].tolist() == [1] * 4 + [2] * 4
        rows = torch.arange(4)[:, None].expand(4, 6).to(dtype) * (rank + 1)
        assert group.reduce_scatter(rows.contiguous())[:, 0].tolist() == [3 * row for row in ([0, 1], [2, 3])[rank]]
        assert (group.broadcast(x.clone(), root=1) == 2).all()
        send, receive = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        assert group.all_to_all(x, send, receive)[:, 0].tolist() == [1] * receive[0] + [2] * receive[1]
        if rank == 0:
            other.send(x, 1)
        else:
            assert (other.recv(torch.zeros_like(x), 0) == 1).all()
    with pytest.raises(DeviceError, match="must be a multiple of 2"):
        group.reduce_scatter(torch.zeros(3))
    group.barrier()
    other.barrier()
    group.close()
    group.close()
    with pytest.raises(DeviceError, match="closed"):
        group.barrier()
    other.barrier()


@pytest.mark.heavy
def test_world_of_two_in_two_groups() -> None:
    mp.spawn(all_of_them, (free_port(),), 2, daemon=True)


def leave(rank: int, port: int) -> None:
    group = join(rank, port, "tp", timeout_s=1000)  # longer than a test may take
    if rank == 1:
        return
    with pytest.raises(DeviceError, match="all_reduce failed on rank 0 of 2"):
        group.all_reduce(torch.ones(4))


@pytest.mark.heavy
def test_a_rank_that_left_is_an_error_and_no_hang() -> None:
    mp.spawn(leave, (free_port(),), 2, daemon=True)


def test_nobody_else_comes() -> None:
    with pytest.raises(DeviceError, match="rank 1 of 2 could not join group 'tp'"):
        join(1, free_port(), "tp", timeout_s=1)


def test_a_group_of_one_changes_nothing() -> None:
    group = find("cpu").open().communicator(Topology(0, 1))
    x = torch.arange(6.0).view(2, 3)
    for result in (group.all_reduce(x), group.all_gather(x), group.reduce_scatter(x), group.broadcast(x), group.all_to_all(x, [2], [2])):
        assert torch.equal(result, torch.arange(6.0).view(2, 3))
    with pytest.raises(DeviceError):
        group.send(x, 1)
    group.barrier()
    group.close()
