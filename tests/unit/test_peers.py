"""Ranks that go are noticed by the others, however they end and whoever they are; and those that leave together are no loss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pagoda.backends.torch_accelerator import comm, peers
from pagoda.backends.torch_accelerator.device import AcceleratorDevice
from pagoda.backends.torch_accelerator.peers import Peers
from pagoda.hal.comm import Topology
from pagoda.hal.errors import DeviceError

PATIENCE_S = 60
DIES = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from pagoda.backends.torch_accelerator.peers import Peers
from pagoda.hal.comm import Topology
port, world = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
peers = Peers(Topology(world - 1, world, f"127.0.0.1:{port}", "g", 60), store, print)
print("there", flush=True)
time.sleep(600)
"""


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE_S), wait_for_workers=False, multi_tenant=True)


def another(store: Any) -> Any:
    """The same store by a connection of its own, as each rank has: one that waits lets no other call through."""
    return dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=PATIENCE_S), wait_for_workers=False)


def topology(rank: int, world: int, store: Any) -> Topology:
    return Topology(rank, world, f"127.0.0.1:{store.port}", "g", PATIENCE_S)


def joined(store: Any, world: int, lost: Callable[[int], Callable[[str], None]], ranks: range) -> list[Peers]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: Peers(topology(rank, world, store), another(store), lost(rank)), ranks))


@pytest.mark.parametrize("leaves", range(3))
def test_all_others_hear_of_a_rank_that_leaves(store: Any, leaves: int) -> None:
    heard = SimpleQueue[tuple[int, str]]()
    group = joined(store, 3, lambda rank: lambda why: heard.put((rank, why)), range(3))
    try:
        group[leaves].close()
        told = dict(heard.get(timeout=PATIENCE_S) for _ in range(2))
        assert told == {rank: f"rank {leaves} of 3 has gone" for rank in range(3) if rank != leaves}
    finally:
        for one in group:
            one.close()
    assert heard.empty()


def test_a_rank_that_is_killed_is_noticed(store: Any) -> None:
    heard = SimpleQueue[str]()
    with subprocess.Popen([sys.executable, "-c", DIES, str(store.port), "2"], stdout=subprocess.PIPE, text=True) as other:
        try:
            (one,) = joined(store, 2, lambda _: heard.put, range(1))
            assert other.stdout is not None and other.stdout.readline() == "there\n"
            os.kill(other.pid, signal.SIGKILL)
            assert heard.get(timeout=PATIENCE_S) == "rank 1 of 2 has gone"
            one.close()
        finally:
            other.kill()


def test_those_that_leave_together_are_no_loss(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GRACE_S", float(PATIENCE_S))
    heard = list[str]()
    for one in joined(store, 3, lambda _: heard.append, range(3)):
        one.close()
        one.close()
    assert heard == []


def test_a_stranger_is_sent_away(store: Any) -> None:
    heard = SimpleQueue[str]()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(Peers, topology(0, 2, store), another(store), heard.put)
        with socket.create_connection(("127.0.0.1", int(store.get(peers.KEY))), timeout=PATIENCE_S) as stranger:
            stranger.sendall(b"\0\0\0\x07")
            assert stranger.recv(1) == b""
        second = Peers(topology(1, 2, store), store, heard.put)
        second.close()
        assert heard.get(timeout=PATIENCE_S) == "rank 1 of 2 has gone"
        first.result().close()


class Group:
    """A process group whose collectives end at once."""

    aborted = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return type("Work", (), {"wait": staticmethod(lambda: None)})

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        assert not self.aborted


def test_a_loss_gives_up_what_waits_and_is_an_error_from_then_on(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Group()
    monkeypatch.setattr(comm, "make_group", lambda *_: made)
    monkeypatch.setattr(comm, "open_store", lambda _: store)
    api = type("Api", (), {"synchronize": staticmethod(lambda device: None)})()
    device = AcceleratorDevice.__new__(AcceleratorDevice)
    device._api, device.torch_device, device._collectives = api, torch.device("cpu"), "nccl"
    device._groups = comm.weakref.WeakSet()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: Peers(topology(1, 2, store), dist.PrefixStore("g", another(store)), lambda _: None))
        group = device.communicator(topology(0, 2, store))
        device.synchronize()
        other.result().close()
    group._peers._thread.join(PATIENCE_S)  # type: ignore[attr-defined]
    assert made.aborted
    with pytest.raises(DeviceError, match="rank 1 of 2 has gone"):
        device.synchronize()
    device.synchronize()
    with pytest.raises(DeviceError, match="rank 1 of 2 has gone"):
        group.all_reduce(torch.ones(2))
    group.close()
