"""The progress of a load as people see it."""

from __future__ import annotations

import io
import logging

import pytest
from pagoda.serving.engine.loading import LoadingLine, Silent, loading_progress
from pagoda.serving.loop_thread import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_sees_one_line_that_is_cleared() -> None:
    out, clock = Terminal(), Clock()
    line = LoadingLine(out, clock)
    line("a", 1_000_000_000, 4_000_000_000)
    assert out.getvalue() == ""
    for seconds, done in ((1.0, 2_000_000_000), (1.1, 2_500_000_000), (2.0, 4_000_000_000)):
        clock.now = 100.0 + seconds
        line("b", done, 4_000_000_000)
    line.end()
    assert out.getvalue().split("\r")[1:] == [
        "loading weights: 2.0 of 4.0 GB, 2.0 GB/s\033[K",
        "loading weights: 4.0 of 4.0 GB, 2.0 GB/s\033[K",
        "\033[K",
    ]


def test_elsewhere_it_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with caplog.at_level(logging.INFO, "pagoda.engine"):
        line = LoadingLine(io.StringIO(), clock)
        for second in range(25):
            clock.now = 100.0 + second
            line("layers.3.ff.up", second * 1_000_000_000, 25_000_000_000)
        line.end()
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 10.0 of 25.0 GB, 1.0 GB/s (layers.3.ff.up)",
        "loading weights: 20.0 of 25.0 GB, 1.0 GB/s (layers.3.ff.up)",
    ]


def test_a_terminal_with_rich_sees_a_bar_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Terminal(), Clock()
    loading = loading_progress(True, out, clock)
    loading("a", 1, 4_000_000_000)
    assert out.getvalue() == ""
    clock.now += 1
    loading("b", 2_000_000_000, 4_000_000_000)
    loading.end()
    shown = out.getvalue()
    assert "loading weights" in shown and "2.0/4.0 GB" in shown
    assert shown.endswith("\033[1A\033[2K") or shown.endswith("\x1b[2K"), shown[-40:]


def test_nothing_is_told_where_nobody_asked(caplog: pytest.LogCaptureFixture) -> None:
    out = Terminal()
    loading = loading_progress(False, out)
    assert isinstance(loading, Silent) and isinstance(loading_progress(True, io.StringIO()), LoadingLine)
    loading("a", 1, 2)
    loading.end()
    assert out.getvalue() == "" and not caplog.records


def test_prompts_have_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    progress = Progress(2, None, out)
    progress.advance(10, 5)
    progress.end()
    assert "prompts" in out.getvalue() and "1/2" in out.getvalue() and "tokens/s out" in out.getvalue()
    quiet = Terminal()
    progress = Progress(2, False, quiet)
    progress.advance(10, 5)
    progress.end()
    assert quiet.getvalue() == ""
