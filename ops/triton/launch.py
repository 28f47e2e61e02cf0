"""How kernels of a step follow each other: where the device can, a kernel starts while the one before it ends, and waits inside."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton.runtime.driver import driver


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels may be launched so (programmatic dependent launch): the driver says, which may stand for an absent device."""
    if device.type not in ("cuda", "meta"):
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel has an `EARLY` parameter, and begins with `if EARLY:` letting the next one start and waiting."""
    return {"EARLY": True, "launch_pdl": True} if overlaps(device) else {"EARLY": False}


def forget() -> None:
    """The driver is another one now."""
    overlaps.cache_clear()
