"""Processes of ours: started without the caller's `__main__`, told what to do over a pipe, and ended when either side of it ends.

The pipe is the leash: a child whose parent ended reads its end and exits, whatever it was doing; a parent whose child ended reads its
end at once. Children stand in sessions of their own, so that Ctrl-C reaches the parent alone, which then stops them in order.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from pagoda.hal import heap
from pagoda.hal.errors import EngineDeadError, PagodaError
from pagoda.serving.engine.logs import LogSettings, set_up, settings_here

_BOOT = (
    "import sys; sys.path[:] = {path!r}; from pagoda.serving.engine.child import main; main({descriptor}, {target!r}, {log!r}, {early!r})"
)


class Child:
    """A child process that runs `target`, "module:function", called with `Inbox` and `Outbox`.

    Args:
        target: what it runs. name: how errors call it. early: modules to import before it is told anything.
        descriptors: open files that it inherits, under the same numbers.
    """

    def __init__(self, target: str, name: str, early: tuple[str, ...] = (), descriptors: tuple[int, ...] = ()) -> None:
        self.name = name
        self.connection, theirs = Pipe()
        code = _BOOT.format(path=sys.path, descriptor=theirs.fileno(), target=target, log=_plain(settings_here()), early=early)
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(), *descriptors), stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()

    def death(self) -> EngineDeadError:
        """How it ended; waits for it, since its pipe closes a moment earlier."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return EngineDeadError(f"{self.name} (process {self.process.pid}) closed its pipe and did not exit")
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return EngineDeadError(f"{self.name} (process {self.process.pid}) {how}; its last lines on standard error say why")

    def kill(self) -> None:
        """End it at once if it still runs; idempotent."""
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def stop(self, timeout_s: float = 20.0) -> None:
        """Ask it to stop, wait, kill it if it does not; idempotent."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()


def engine_child() -> Child:
    """The engine's process, before anybody has a starter for it, or has set up a log: its imports take longest, so a server begins
    with them."""
    return Child("pagoda.serving.engine.process:serve", "the engine", ("pagoda.serving.engine.build",))


class Inbox:
    """What the parent sends. A thread reads it, so that the parent's end is noticed during long work too."""

    def __init__(self, connection: Connection) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._connection = connection
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def get(self) -> Any:
        """The next message; None asks to stop."""
        return self._items.get()

    def _read(self) -> None:
        while True:
            try:
                self._items.put(self._connection.recv())
            except (EOFError, OSError):
                # The parent is gone: nobody is left to answer, and a thread may hang in a collective with a peer that ended as well.
                os._exit(1)
            except Exception:  # a message that cannot be read here: waiting for another would be for ever, and so would the parent's
                traceback.print_exc()
                os._exit(1)


class Outbox:
    """What goes to the parent, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._connection.send(message)


def portable(error: BaseException, where: str) -> PagodaError:
    """The error itself where it is ours, otherwise one that holds its traceback: what can cross a pipe."""
    if isinstance(error, PagodaError):
        return error
    lines = "".join(traceback.format_exception(error)).rstrip()
    return EngineDeadError(f"{where} failed with {error!r}\n{lines}")


def _plain(log: LogSettings | None) -> tuple[int, str] | None:
    """As it stands in a line of Python."""
    return None if log is None else (log.level, log.form)


def log_alike(log: LogSettings | None) -> None:
    """Log as the process with these settings does; nothing where this one logs already."""
    if log is not None:
        set_up(log)


def main(descriptor: int, target: str, log: tuple[int, Any] | None, early: tuple[str, ...] = ()) -> None:
    """The child's side: log as the parent does, run `target`, exit with the code that it returns."""
    log_alike(log and LogSettings(*log))
    with heap.only_growing():
        for name in early:
            with contextlib.suppress(ImportError):  # whoever needs it later says what is missing
                import_module(name)
    connection = Connection(descriptor)
    module, _, function = target.partition(":")
    outbox = Outbox(connection)
    code: int = getattr(import_module(module), function)(Inbox(connection), outbox)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
