"""A bar of rich on a terminal. rich is optional here: where it is not installed, and where the output is no terminal, there is none."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TextIO


class TerminalBar:
    """One bar that leaves nothing behind; it appears with the first `update`.

    Args:
        columns: classes of `rich.progress` to stand after the bar.
    """

    def __init__(self, out: TextIO, label: str, columns: tuple[str, ...]) -> None:
        rich, console = import_module("rich.progress"), import_module("rich.console").Console(file=out)
        shown = (rich.TextColumn("{task.description}"), rich.BarColumn(), *(getattr(rich, name)() for name in columns))
        self._bar = rich.Progress(*shown, rich.TextColumn("{task.fields[note]}"), console=console, transient=True)
        self._task = self._bar.add_task(label, total=None, note="")

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show it, or move it."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        self._bar.start()

    def end(self) -> None:
        self._bar.stop()


def terminal_bar(out: TextIO, label: str, columns: tuple[str, ...]) -> TerminalBar | None:
    """None where there can be no bar."""
    return TerminalBar(out, label, columns) if out.isatty() and find_spec("rich") is not None else None
