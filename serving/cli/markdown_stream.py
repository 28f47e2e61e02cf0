"""Markdown on a terminal while it is being written: finished blocks are printed for good, only the last one is redrawn."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

_REDRAW = 1 / 20


class MarkdownStream:
    """Shows a growing text; use it as a context manager, around one answer, in an event loop: what comes soon after a drawing is drawn when
    its time has come, whether or not more text follows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tail = _Tail()
        self._live = Live(self._tail, console=console, auto_refresh=False, transient=True, vertical_overflow="visible")
        self._text = ""
        self._printed = 0
        self._drawn = 0.0
        self._due: asyncio.TimerHandle | None = None

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._due is not None:
            self._due.cancel()
        self._tail.text = ""
        self._live.stop()
        self._print(len(self._text))

    def update(self, text: str) -> None:
        """The whole text so far."""
        self._text = text
        if self._due is None:
            wait = self._drawn + _REDRAW - time.monotonic()
            if wait > 0:
                self._due = asyncio.get_running_loop().call_later(wait, self._draw)
            else:
                self._draw()

    def _draw(self) -> None:
        self._due, self._drawn = None, time.monotonic()
        self._print(finished_blocks(self._text, self._printed))
        self._tail.text, self._tail.separate = self._text[self._printed :], self._printed > 0
        self._live.refresh()

    def _print(self, end: int) -> None:
        block, first = self._text[self._printed : end], self._printed == 0
        self._printed = end
        if block.strip():
            if not first:
                self._console.print()
            self._console.print(_Block(block))


class _Block:
    """Markdown without the empty lines that some of its elements put around themselves; only the last `most` lines."""

    def __init__(self, text: str, most: int | None = None) -> None:
        self._markdown = Markdown(text, code_theme="ansi_dark")
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._markdown, options, pad=False)
        full = [i for i, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        shown = lines[full[0] : full[-1] + 1] if full else []
        for i, line in enumerate(shown[-self._most :] if self._most else shown):
            if i:
                yield Segment.line()
            yield from line
        yield Segment.line()


class _Tail:
    """The end of what is not finished, as many lines as fit the screen."""

    def __init__(self) -> None:
        self.text = ""
        self.separate = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.text.strip():
            return
        if self.separate:
            yield Segment.line()
        yield _Block(self.text, max(console.height - 4, 1))


def finished_blocks(text: str, start: int = 0) -> int:
    """Where the last finished block ends, from `start` (the end of one) on: after a blank line that is not inside a code fence."""
    end, fence, position = start, "", start
    for line in text[start:].splitlines(keepends=True):
        position += len(line)
        mark = line.lstrip()[:3]
        if fence:
            fence = "" if mark == fence and not line.strip().strip(fence[0]) else fence
        elif mark in ("```", "~~~"):
            fence = mark
        elif line.endswith("\n") and not line.strip() and text[position:].strip():
            end = position
    return end
