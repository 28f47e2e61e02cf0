"""How far the loading of weights is: a line that is rewritten on a terminal, a log record now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

log = logging.getLogger("pagoda.engine")

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0
"""How often each is told. A load that is over before the first of these says nothing."""


class LoadingLine:
    """A `Progress` (see `models.loading.progress`); `end` clears the line."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._every = TERMINAL_SECONDS if self._out.isatty() else LOG_SECONDS
        self._began = self._told = clock()
        self._shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        now = self._clock()
        if now - self._told < self._every:
            return
        self._told = now
        rate = done / 1e9 / max(now - self._began, 1e-9)
        line = f"loading weights: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.1f} GB/s"
        if self._out.isatty():
            self._shown = True
            print(f"\r{line}\033[K", end="", file=self._out, flush=True)
        else:
            log.info("%s (%s)", line, name)

    def end(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=self._out, flush=True)
