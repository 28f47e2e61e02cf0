"""Turns on the processors: threads that work for microseconds at a time come before those that compute, which lose nothing by it.

Where an engine computes on all processors, whoever wakes up to hand on a request or a token waits for the end of somebody's turn, up to
5 ms with Linux's defaults. A thread that asks for shorter turns gets the same share of time and interrupts the longer ones.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

SHORT_NS = 100_000
"""The shortest that Linux gives."""

_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""`sched_setattr`; the next number is `sched_getattr`."""
_ATTRIBUTES = struct.Struct("IIQiIQQQII")
"""size, policy, flags, nice, priority, runtime, deadline, period, least and most utilization."""
_NORMAL = 0


def take_short_turns() -> bool:
    """For the calling thread and those that it starts. False where the system knows no such thing, as Linux before 6.12."""
    return _ask(SHORT_NS)


def take_usual_turns() -> bool:
    """For a thread that computes, whoever started it."""
    return _ask(0)


def turn_ns() -> int:
    """How long the calling thread's turns are; 0 where that cannot be known."""
    now = _now()
    return now[5] if now is not None else 0


def _ask(nanoseconds: int) -> bool:
    now = _now()
    if now is None or now[1] != _NORMAL:
        return False
    asked = _ATTRIBUTES.pack(*now[:5], nanoseconds, 0, 0, 0, 0)
    return ctypes.CDLL(None).syscall(_CALLS[platform.machine()], 0, asked, 0) == 0


def _now() -> tuple[int, ...] | None:
    if not sys.platform.startswith("linux") or platform.machine() not in _CALLS:
        return None
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    failed = ctypes.CDLL(None).syscall(_CALLS[platform.machine()] + 1, 0, found, _ATTRIBUTES.size, 0)
    return None if failed else _ATTRIBUTES.unpack(found.raw)
