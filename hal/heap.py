"""The heap of this process, which keeps what was freed until it is asked to give it back."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def trim() -> None:
    """Return what is free on the heap to the system; nothing where the C library cannot (glibc can)."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


@contextmanager
def only_growing() -> Iterator[None]:
    """While modules are imported: they leave no garbage, and each look for some takes longer than the one before. What is there
    afterwards stays, and is not looked at again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
