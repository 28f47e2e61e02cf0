"""How kernels of a step follow each other: where the device can, a kernel starts while the one before it ends, and waits inside."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels may be launched so (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel has an `EARLY` parameter, and begins with `if EARLY:` letting the next one start and waiting."""
    return {"EARLY": True, "launch_pdl": True} if overlaps(device) else {"EARLY": False}
