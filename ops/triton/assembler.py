"""Which of NVIDIA's assemblers makes programs of Triton's PTX: the newest of those that Triton brings.

Triton 3.6 has two, 12.8 for devices before sm100 and 12.9 for later ones. That of 12.8 loses where the tiles of a matrix product lie in
shared memory, once in a while: descriptors of sm90's `wgmma` hold a kernel's argument or what a request's end is, and the product reads
anything. Seen with the gated delta rule's chunks, attention whose values are narrower than its keys and heads of 72 (an H200, 2026-11-30);
12.9 makes right programs of the same PTX.
"""

from __future__ import annotations

import os

from triton import knobs


def use_newest() -> None:
    """From the next program on, unless the user has named an assembler (`TRITON_PTXAS_PATH`), or Triton has but one."""
    if os.environ.get("TRITON_PTXAS_PATH") or not hasattr(knobs.nvidia, "ptxas_blackwell"):
        return
    own, other = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    if _number(other.version) > _number(own.version):
        # Triton would put it into the environment too, where processes of ours would take it for the user's.
        before, knobs.propagate_env = knobs.propagate_env, False
        try:
            knobs.nvidia.ptxas = other.path
        finally:
            knobs.propagate_env = before


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
