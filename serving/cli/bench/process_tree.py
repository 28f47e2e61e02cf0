"""Memory and processor time of a process and all its descendants, from Linux's /proc."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

PERIOD = 0.5
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def tree(root: int) -> list[int]:
    """The process and its descendants, those that live."""
    found, left = [], [root]
    while left:
        pid = left.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            left += [int(child) for child in _read(children).split()]
    return found


def pss_mib(root: int) -> float:
    """Proportional set size of the tree: pages that several share count once."""
    return sum(_pss_kib(pid) for pid in tree(root)) / 1024


def _pss_kib(pid: int) -> int:
    lines = _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


class PeakMemory(threading.Thread):
    """Looks at a tree's memory now and then; `peak` is the most seen, in MiB."""

    def __init__(self, root: int) -> None:
        super().__init__(name="memory", daemon=True)
        self.peak = 0.0
        self._root, self._end = root, threading.Event()

    def run(self) -> None:
        while not self._end.wait(PERIOD):
            self.peak = max(self.peak, pss_mib(self._root))

    def end(self) -> float:
        self.peak = max(self.peak, pss_mib(self._root))
        self._end.set()
        self.join()
        return self.peak


class Busy(NamedTuple):
    """Processor seconds since boot, of everybody and of this process's tree, at a time."""

    at: float
    all: float
    own: float

    @classmethod
    def now(cls) -> Busy:
        user, nice, system, _, _, irq, softirq, *_ = map(int, _read(Path("/proc/stat")).split(maxsplit=9)[1:9])
        return cls(time.perf_counter(), (user + nice + system + irq + softirq) / TICKS, sum(map(_seconds, tree(os.getpid()))))

    def others(self, later: Busy) -> float:
        """Cores that other processes used between here and there."""
        return max(0.0, ((later.all - self.all) - (later.own - self.own)) / (later.at - self.at))


def _seconds(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended while we looked
        return ""
