"""An asyncio loop in a thread of its own, so that blocking callers work inside notebooks and other loops; and how far they are."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, TextIO, TypeVar

from pagoda.serving.engine.progress import terminal_bar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines from any thread but its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagoda-sdk", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt (Ctrl-C) cancels it and waits until it has cleaned up."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                asyncio.run_coroutine_threadsafe(_settle(), self._loop).result()
            raise

    def stop(self) -> None:
        """End the loop; idempotent."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _settle() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others, timeout=5) if others else None


class Progress:
    """Requests done and tokens a second: a bar on a terminal, elsewhere a line that is rewritten.

    `shown` None means on a terminal, for more than one request.
    """

    def __init__(self, total: int, shown: bool | None = None, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._total = total
        self._shown = (self._out.isatty() and total > 1) if shown is None else shown
        self._bar = terminal_bar(self._out, "prompts", ("MofNCompleteColumn", "TimeRemainingColumn")) if self._shown else None
        self._done = self._read = self._written = 0
        self._started = time.perf_counter()

    def advance(self, prompt_tokens: int, output_tokens: int) -> None:
        """One more request is done."""
        self._done, self._read, self._written = self._done + 1, self._read + prompt_tokens, self._written + output_tokens
        seconds = max(time.perf_counter() - self._started, 1e-9)
        speed = f"{self._read / seconds:.0f} tokens/s in, {self._written / seconds:.0f} tokens/s out"
        if self._bar is not None:
            self._bar.update(self._done, self._total, speed)
        elif self._shown:
            print(f"\r{self._done}/{self._total} prompts, {speed}\033[K", end="", file=self._out, flush=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.end()
        elif self._shown:
            print(file=self._out, flush=True)
