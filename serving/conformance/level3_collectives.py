"""Level 3, collectives: worlds of 1, 2 and 4, every dtype, and inside captured steps where claimed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from functools import partial

import torch
from pagoda.hal.comm import Communicator, Topology, joined_sums
from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.memory import MemoryKind
from pagoda.ops.norm import AddRmsNormReference, NormFacts
from pagoda.serving.conformance.check import Check, FailedError, Target, expect
from pagoda.serving.conformance.ranks import RankWork, free_port, run_ranks

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier")
SOON_S = 50
"""Seconds until the loss of a rank must show; the groups' own time-out is a little longer, and waiting for it is no answer."""
DTYPES = ("float32", "bfloat16", "float16", "int32", "int64")


def checks(target: Target) -> Iterator[Check]:
    """All of level 3."""
    yield Check(3, "a world of 1", _alone)
    for world in (2, 4):
        yield Check(3, f"a world of {world}", partial(_ranks, world=world, work=every_collective))
    yield Check(3, "two groups in one process", partial(_ranks, world=2, work=second_group))
    yield Check(3, "a rank that ends is an error for the other, soon", partial(_ranks, world=2, work=lost_rank))
    yield Check(
        3, "a rank that is killed is an error for the other, which lives on", partial(_ranks, world=2, work=killed_rank, killed={1})
    )
    yield Check(3, "a rank that never comes is an error", _absent_rank)


def every_collective(device: Device, group: Communicator) -> str:
    """All eight on this rank, against what the ranks' known contributions give."""
    used = [name for name in DTYPES if name in device.info.dtypes or name.startswith("int")]
    for name in used:
        for size in (1, 6, 1031):
            _reductions(device, group, getattr(torch, name), size)
            _exchanges(device, group, getattr(torch, name), size)
    joined = [name for name in used if not name.startswith("int") and _joined(device, group, getattr(torch, name))]
    captured = [op for op in COLLECTIVES if group.capturable(op)]
    if "all_reduce" in captured:
        _captured(device, group)
    return f"{', '.join(used)}; inside captured steps: {', '.join(captured) or 'none'}; sums with norms in {', '.join(joined) or 'none'}"


def _mine(device: Device, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank `rank` contributes: small integers, so that every dtype sums them exactly."""
    values = (torch.arange(torch.Size(shape).numel()).view(shape) + 3 * rank) % 11
    return device.memory.alloc(MemoryKind.WORK, shape, dtype).copy_(values)


def _reductions(device: Device, group: Communicator, dtype: torch.dtype, size: int) -> None:
    everyone = [_mine(device, rank, (group.world * 2, size), dtype) for rank in range(group.world)]
    own = everyone[group.rank].clone()
    total = torch.stack(everyone).sum(0).to(dtype)
    result = group.all_reduce(own)
    _equal("all_reduce", result, total)
    expect(result.data_ptr() == own.data_ptr(), "all_reduce is in place")
    _equal("all_reduce max", group.all_reduce(everyone[group.rank].clone(), "max"), torch.stack(everyone).amax(0))
    scattered = group.reduce_scatter(everyone[group.rank].clone())
    _equal("reduce_scatter", scattered, total[2 * group.rank : 2 * group.rank + 2])


def _joined(device: Device, group: Communicator, dtype: torch.dtype) -> bool:
    """A sum with the norm behind it, where there is such a kernel."""
    sums = joined_sums(group)
    if sums is None:
        return False
    *everyone, residual = (_mine(device, rank, (5, 96), dtype) for rank in range(group.world + 1))
    weight = _mine(device, 1, (96,), dtype)
    result = sums.all_reduce_add_norm(everyone[group.rank].clone(), residual.clone(), weight, 1e-6, 1.0)
    if result is None:
        return False
    facts = NormFacts("float64", 96, 1e-6, offset=1.0)
    wide = torch.stack([x.cpu() for x in everyone]).double().sum(0), residual.cpu().double()
    normed, total = AddRmsNormReference(facts).run({"weight": weight.cpu().double()}, *wide)
    _equal("the sum of all_reduce_add_norm", result[1], total.to(dtype))
    error = ((result[0].cpu().double() - normed).abs() / (1 + normed.abs())).max()
    expect(float(error) <= 4 * torch.finfo(dtype).eps, f"the norm of all_reduce_add_norm is off by {float(error):.2g} in {dtype}")
    return True


def _exchanges(device: Device, group: Communicator, dtype: torch.dtype, size: int) -> None:
    rank, world = group.rank, group.world
    everyone = [_mine(device, one, (3, size), dtype) for one in range(world)]
    _equal("all_gather last", group.all_gather(everyone[rank]), torch.cat(everyone, dim=-1))
    _equal("all_gather first", group.all_gather(everyone[rank], dim=0), torch.cat(everyone, dim=0))
    _equal("broadcast", group.broadcast(everyone[rank].clone(), root=world - 1), everyone[-1])
    # Rank a sends a + b + 1 rows to rank b; the row's content says which.
    counts = [[a + b + 1 for b in range(world)] for a in range(world)]
    rows = [_mine(device, a, (sum(counts[a]), size), dtype) for a in range(world)]
    pieces = [rows[a].split(counts[a])[rank] for a in range(world)]
    _equal("all_to_all", group.all_to_all(rows[rank], counts[rank], [counts[a][rank] for a in range(world)]), torch.cat(pieces))
    _ring(group, everyone)
    group.barrier()


def _ring(group: Communicator, everyone: list[torch.Tensor]) -> None:
    if group.world == 1:
        return
    after, before = (group.rank + 1) % group.world, (group.rank - 1) % group.world
    received = torch.zeros_like(everyone[0])
    if group.rank == 0:
        group.send(everyone[0], after)
        group.recv(received, before)
    else:
        group.recv(received, before)
        group.send(everyone[group.rank], after)
    _equal("send and recv", received, everyone[before])


def _captured(device: Device, group: Communicator) -> None:
    x = _mine(device, group.rank, (5, 7), torch.float32)
    replay = device.graphs.capture("all_reduce", lambda tensor: group.all_reduce(tensor * 2), (x,))
    for turn in range(3):
        x.copy_(_mine(device, group.rank + turn, (5, 7), torch.float32))
        expected = torch.stack([_mine(device, rank + turn, (5, 7), torch.float32).cpu() * 2 for rank in range(group.world)]).sum(0)
        result = replay()
        device.synchronize()
        _equal("all_reduce inside a captured step", result, expected)


def second_group(device: Device, group: Communicator) -> str:
    """Another group of the same ranks beside the first, each with its own traffic."""
    port = device.memory.alloc(MemoryKind.WORK, (1,), torch.int64).fill_(free_port())
    address = f"127.0.0.1:{int(group.broadcast(port).cpu())}"
    other = device.communicator(Topology(group.rank, group.world, address, "second", 60))
    x = _mine(device, group.rank, (4,), torch.float32)
    first, second = group.all_reduce(x.clone()), other.all_reduce(x.clone(), "max")
    expect(not torch.equal(first.cpu(), second.cpu()), "two groups gave the same result for different operations")
    other.close()
    group.barrier()
    return "independent, and one outlives the other"


def lost_rank(device: Device, group: Communicator) -> str:
    """Rank 1 leaves; rank 0 must get `DeviceError` well before it gives up for good."""
    if group.rank == 1:
        group.close()
        return "left"
    return _sees_the_loss(device, group)


def killed_rank(device: Device, group: Communicator) -> str:
    """Rank 1 dies without a word; rank 0 must get `DeviceError` soon, and both its process and its device must go on."""
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _sees_the_loss(device, group)


def _sees_the_loss(device: Device, group: Communicator) -> str:
    start = time.monotonic()
    try:
        group.all_reduce(_mine(device, 0, (1000,), torch.float32))
        device.synchronize()
    except DeviceError:
        took = time.monotonic() - start
    else:
        raise FailedError("a collective with a rank that is gone succeeded")
    expect(took < SOON_S, f"the loss of a rank was an error after {took:.0f} s only; {SOON_S} are allowed")
    own = _mine(device, 0, (1000,), torch.float32) + 1
    _equal("a sum on the device after the loss", own.sum(), (_mine(device, 0, (1000,), torch.float32).cpu() + 1).sum())
    return f"DeviceError after {took:.1f} s, and the device goes on"


def _absent_rank(target: Target) -> None:
    start = time.monotonic()
    try:
        target.device.communicator(Topology(1, 2, f"127.0.0.1:{free_port()}", "alone", 2))
    except DeviceError:
        expect(time.monotonic() - start < 60, "it took over a minute to give up after a time-out of 2 s")
    else:
        raise FailedError("a group of two was joined by one")


def _ranks(target: Target, world: int, work: RankWork, killed: Collection[int] = ()) -> str:
    return run_ranks(target, world, work, killed=frozenset(killed))[0]


def _alone(target: Target) -> str:
    group = target.device.communicator(Topology(0, 1))
    try:
        return every_collective(target.device, group)
    finally:
        group.close()


def _equal(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = found.cpu(), expected.cpu()
    same = found.shape == expected.shape and torch.equal(found, expected)
    expect(
        same,
        f"{what} [{found.dtype}] of {tuple(expected.shape)} gave {found.flatten()[:8].tolist()}, not {expected.flatten()[:8].tolist()}",
    )
