"""Memory that the GPUs of one host share: every rank of a group has a region, and maps the others' (CUDA IPC)."""

from __future__ import annotations

import ast
import ctypes
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pagoda.hal.comm import Topology

if TYPE_CHECKING:
    from pagoda.ops.triton.one_shot import Region

log = logging.getLogger("pagoda.cuda")

NATIVE_ATOMICS = 3
"""`CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`: NVLink has them, PCI Express has not."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
_STORAGE: Any = torch.UntypedStorage  # its sharing is in no stub


class Offer(NamedTuple):
    """What a rank tells the others. host: alike where the kernel is the same one; gpu: its UUID; handle: of `_share_cuda_`, empty where the
    memory cannot be shared."""

    host: str
    gpu: str
    handle: tuple[Any, ...]


def open_region(store: Any, topology: Topology, device: torch.device) -> Region | None:
    """The group's region for sums in one kernel; None on every rank where one of them does not reach all others, which is logged.

    store: the group's c10d key-value store. Blocks until all ranks are here.
    """
    if find_spec("triton") is None:
        store.set(f"region/{topology.rank}", repr(tuple(Offer("", "", ()))))
        return _agreed(store, topology, "triton is not installed", lambda: None)
    from pagoda.ops.triton.one_shot import Region, region_bytes  # triton is optional

    mine = torch.zeros(region_bytes(topology.world), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # zeros before anybody signals
    offer = Offer(BOOT.read_text().strip(), _uuid(device.index), _shared(mine))
    store.set(f"region/{topology.rank}", repr(tuple(offer)))
    offers = [Offer(*ast.literal_eval(store.get(f"region/{rank}").decode())) for rank in range(topology.world)]
    lacks = next(filter(None, (unreachable(offer, other, device) for other in offers)), "")
    maps: list[torch.Tensor] = []
    try:
        for rank, other in enumerate(offers if not lacks else ()):
            maps.append(mine if rank == topology.rank else _mapped(other.handle, device))
    except RuntimeError as error:
        lacks = f"memory of another rank cannot be mapped: {error}"
    return _agreed(store, topology, lacks, lambda: Region.over(topology.rank, maps))


def _agreed(store: Any, topology: Topology, lacks: str, make: Callable[[], Region | None]) -> Region | None:
    """What `make` makes, where nobody lacks anything."""
    store.set(f"region/{topology.rank}/lacks", lacks)
    all_lack = [store.get(f"region/{rank}/lacks").decode() for rank in range(topology.world)]
    if not any(all_lack):
        return make()
    rank = next(rank for rank, lack in enumerate(all_lack) if lack)
    log.info("group %r sums by NCCL alone, since on rank %d %s", topology.name, rank, all_lack[rank])
    return None


def unreachable(mine: Offer, other: Offer, device: torch.device) -> str:
    """Why kernels of this rank cannot work in the other's memory; "" where they can."""
    if not other.handle:
        return "memory cannot be shared with other processes"
    if mine.host != other.host:
        return "another host is in the group"
    if mine.gpu == other.gpu:
        return ""
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    if other.gpu not in visible:
        return f"GPU {other.gpu} is not visible"
    able = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(able), NATIVE_ATOMICS, device.index, visible[other.gpu])
    return "" if able.value else f"atomic operations do not reach GPU {other.gpu}: there is no NVLink"


def _shared(region: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tuple(region.untyped_storage()._share_cuda_())
    except RuntimeError as error:  # a container without IPC, or an allocator whose memory has no handles
        log.info("memory cannot be shared with other processes: %s", error)
        return ()


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _mapped(handle: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """The other's region in this process's addresses, to be reached from `device`: the owner's number for its GPU, which comes first in the
    handle, means nothing here."""
    storage = _STORAGE._new_shared_cuda(device.index, *handle[1:])
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
