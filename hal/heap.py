"""The heap of this process, which keeps what was freed until it is asked to give it back."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Return what is free on the heap to the system; nothing where the C library cannot (glibc can)."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
