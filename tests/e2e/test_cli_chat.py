"""`pagoda chat --url` as its users run it: in a pipe and on a terminal, against a real server process with the toy engine."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import LIMIT_S
from toy_process import ServerProcess

COMMAND = [sys.executable, "-m", "pagoda.serving.cli.main", "chat"]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x01\x02\r]")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess.toy(delay=0.2) as server:
        server.go_on()
        yield server


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.where


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._end, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        # Where the tests run in a shell's background, interrupts are ignored, and a child would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        signal.signal(signal.SIGINT, before)
        os.close(theirs)
        self._raw = b""
        self._taken = 0

    def wait_for(self, pattern: str) -> str:
        """What is shown up to the pattern, without control codes; the next call begins after it."""
        end = time.monotonic() + LIMIT_S
        while True:
            # from the beginning each time: a read may end inside a character or a control code
            shown = CONTROL.sub("", self._raw.decode(errors="ignore"))[self._taken :]
            if found := re.search(pattern, shown):
                self._taken += found.end()
                return shown[: found.end()]
            assert select.select([self._end], [], [], max(end - time.monotonic(), 0))[0], f"no {pattern!r} in {shown!r}"
            self._raw += os.read(self._end, 65536)

    def type(self, line: str) -> None:
        os.write(self._end, line.encode())

    def quit(self, words: str = "/quit\n") -> int:
        """What is typed while a prompt is being set up is dropped, as terminals do: so again until it is heard."""
        for _ in range(int(LIMIT_S)):
            with contextlib.suppress(OSError):  # it has just ended
                self.type(words)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(1)
        raise AssertionError("the chat did not end")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(url: str) -> Iterator[Terminal]:
    made = Terminal("--url", url, "--max-tokens", "400")
    try:
        made.wait_for("› ")
        yield made
    finally:
        made.close()


def pipe(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_pipe_is_one_message_and_a_plain_answer(url: str) -> None:
    done = pipe("--url", url, "--system", "S.", "--max-tokens", "400", text="two\nlines\n")
    assert (done.returncode, done.stdout) == (0, "system:S.\nuser:two\nlines\nassistant:\n")  # the toy repeats its prompt
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s, first after \d+ ms\n", done.stderr)


def test_errors_in_a_pipe_are_one_line(url: str) -> None:
    gone = pipe("--url", "http://127.0.0.1:1", text="hi")
    assert gone.returncode == 1 and "http://127.0.0.1:1 does not answer" in gone.stderr and "Traceback" not in gone.stderr
    absent = pipe("nothing", "--url", url, text="hi")
    assert absent.returncode == 1 and "refused with 404" in absent.stderr and "nothing" in absent.stderr
    wrong = pipe("--url", url, "--temperatur", "1", text="hi")
    assert wrong.returncode == 2 and "did you mean --temperature?" in wrong.stderr


def test_a_conversation_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("**hello**\n")
    shown = terminal.wait_for(r"\d+ tokens, [\d.]+ tokens/s")
    assert "user:hello" in shown  # as markdown
    terminal.wait_for("› ")
    terminal.type("/temp 0\n")
    terminal.wait_for("Temperature: 0.0")
    terminal.type(f"/save {tmp_path / 'talk.md'}\n")
    terminal.wait_for("Saved 2 messages")
    assert "**user**\n\n**hello**" in (tmp_path / "talk.md").read_text()
    terminal.type("/clear\n/what\n")
    terminal.wait_for("no command /what")
    assert terminal.quit("\x04") == 0


def test_an_interrupt_stops_the_answer_and_keeps_the_conversation(terminal: Terminal, server: ServerProcess) -> None:
    server.hold()
    terminal.type("x" * 380 + "\n")
    terminal.wait_for("user:")
    os.killpg(terminal.process.pid, signal.SIGINT)
    assert int(re.findall(r"(\d+) tokens", terminal.wait_for(r"\d+ tokens.*stopped"))[-1]) < 380
    server.go_on()
    terminal.wait_for("› ")
    assert terminal.quit() == 0


def test_an_error_of_the_server_leaves_the_chat_open(terminal: Terminal) -> None:
    for _ in range(3):
        terminal.type("y" * 1500 + "\\\n")
    terminal.type("z\n")
    terminal.wait_for("refused with 400")
    terminal.wait_for("› ")
    terminal.type("short\n")
    terminal.wait_for("user:short")
