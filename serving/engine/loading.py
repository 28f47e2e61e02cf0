"""How far the loading of weights is: a bar on a terminal (a line that is rewritten, without rich), a log record now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from pagoda.serving.engine.progress import TerminalBar, terminal_bar

log = logging.getLogger("pagoda.engine")

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0
"""How often each is told. A load that is over before the first of these says nothing."""


class Loading(Protocol):
    """A `Progress` (see `models.loading.progress`) that leaves nothing on a terminal after its `end`."""

    def __call__(self, name: str, done: int, total: int) -> None: ...

    def end(self) -> None: ...


def loading_progress(shown: bool, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> Loading:
    """What fits the output, standard error where none is given; nothing is told unless `shown`."""
    if not shown:
        return Silent()
    bar = terminal_bar(out or sys.stderr, "loading weights", ("DownloadColumn", "TransferSpeedColumn", "TimeRemainingColumn"))
    return LoadingLine(out, clock) if bar is None else LoadingBar(bar, clock)


class Silent:
    def __call__(self, name: str, done: int, total: int) -> None: ...

    def end(self) -> None: ...


class LoadingBar:
    def __init__(self, bar: TerminalBar, clock: Callable[[], float]) -> None:
        self._bar, self._clock = bar, clock
        self._told = clock()

    def __call__(self, name: str, done: int, total: int) -> None:
        if self._clock() - self._told >= TERMINAL_SECONDS:
            self._told = self._clock()
            self._bar.update(done, total)

    def end(self) -> None:
        self._bar.end()


class LoadingLine:
    """Clears its line at the end."""

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
