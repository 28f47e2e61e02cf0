"""What a launch asks of the driver: room for a program, and whether a kernel may start while the one before it ends, and wait inside."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from pagoda.ops.triton.assembler import use_newest
from triton.runtime.driver import driver

use_newest()  # before any kernel is compiled: all of them are launched with what is here

BESIDE = 1024
"""Bytes of shared memory that a product with scales needs beside its stages."""


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels may be launched so (programmatic dependent launch): the driver says, which may stand for an absent device."""
    if device.type not in ("cuda", "meta"):
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def describes(device: torch.device) -> bool:
    """Whether weights or pages may come through tensor descriptors: devices without them would imitate them; the interpreter can."""
    return device.type == "cpu" or overlaps(device)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program may have, as the driver says; without bound on the host, where Triton's interpreter has none."""
    if device.type == "cpu":
        return sys.maxsize
    active = driver.active
    return int(active.utils.get_device_properties(active.get_current_device())["max_shared_mem"])


@cache
def processors(device: torch.device) -> int:
    """How many of them there are, for kernels whose programs take tile after tile; a few on the host, where programs run one by one."""
    if device.type == "cpu":
        return 3
    active = driver.active
    return int(active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"])


@cache
def most_stages(device: torch.device, bias: bool = False) -> int:
    """Stages that a loop may have whose loads need a number that another load of it brings: AMD's compiler loses that one with more. And
    where scores have a `bias` and blocks few rows, it ends with a cast left over of the sums that pass from one such loop to the next."""
    if device.type == "cpu" or driver.active.get_current_target().backend != "hip":
        return 8
    return 1 if bias else 2


def fitting_stages(device: torch.device, most: int, stage: int, beside: int = 0) -> int:
    """Stages of a loop, of `stage` bytes each: as many as a program's shared memory holds with `beside` more bytes, one at least and
    `most` at most."""
    return max(1, min(most, (shared_memory(device) - beside) // stage))


@cache
def waves_of_32(device: torch.device) -> bool:
    """Whether AMD's matrix instructions run in waves of 32 (RDNA): each wave holds a whole tile of keys and of values in its registers."""
    if device.type == "cpu":
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "hip" and target.warp_size == 32)


@cache
def narrow_units(device: torch.device) -> bool:
    """Whether NVIDIA's matrix instructions are a warp's (all but sm90 and sm100's), whose numbers lie in its registers."""
    if device.type == "cpu":
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch // 10 not in (9, 10))


@cache
def lacks_float8(device: torch.device) -> bool:
    """Whether Triton has no e4m3 there, so that kernels take its bytes: NVIDIA before sm89; and the interpreter rounds its own way."""
    if device.type == "cpu":
        return True
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch < 89)


EARLY_ROWS = 64
"""With more rows the product before a kernel is the vendor's, which lets nobody start early: between the two an edge of a captured step
that waits for the end takes 0.95 µs where a plain one takes 0.45 (H200)."""


def early(device: torch.device, rows: int = 0) -> dict[str, Any]:
    """Arguments of a launch whose kernel has an `EARLY` parameter (`order.py`). `rows`: of a kernel that stands behind a product."""
    return {"EARLY": True, "launch_pdl": True} if rows <= EARLY_ROWS and overlaps(device) else {"EARLY": False}


def registers(device: torch.device, most: int) -> dict[str, int]:
    """Arguments of a launch whose programs are to have no more registers a thread, so that more of them run beside each other."""
    return {"maxnreg": most} if device.type != "cpu" and driver.active.get_current_target().backend == "cuda" else {}


def forget() -> None:
    """The driver is another one now."""
    overlaps.cache_clear()
    shared_memory.cache_clear()
    processors.cache_clear()
    most_stages.cache_clear()
    waves_of_32.cache_clear()
    narrow_units.cache_clear()
    lacks_float8.cache_clear()
