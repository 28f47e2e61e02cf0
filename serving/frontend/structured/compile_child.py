"""xgrammar's compiler in processes of its own, which hostile grammars can neither make wait for ever nor eat the engine's memory."""

from __future__ import annotations

import re
import resource
import weakref
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any, NamedTuple

from pagoda.hal import heap
from pagoda.hal.errors import PagodaError, RequestError
from pagoda.serving.engine.child import Child, Inbox, Outbox
from pagoda.serving.frontend.structured.vocabulary import Vocabulary
from pagoda.serving.frontend.structured.xgrammar_backend import compile_source, token_info

CHILDREN = 2
"""Grammars that are compiled at a time: beside one that takes all of its time, others take theirs."""
COMPILE_SECONDS = 15.0
START_SECONDS = 120.0
COMPILE_BYTES = 2 << 30
"""What one compiler may take beyond what it has when it begins."""
MOST_TAKE = 512 << 20
"""The same of the others, and of whatever is compiled at first: what needs more waits until no other does."""
REMEMBERED = 256
"""Grammars that were given up, which are not tried again."""

OUT_OF_MEMORY = (False, "out of memory")
_LOG_HEAD = re.compile(r"^\[\S*\] \S+:\d+: ")
_TARGET = "pagoda.serving.frontend.structured.compile_child:serve"


class _Running(NamedTuple):
    """A process that waits for a grammar, and how it is ended."""

    child: Child
    end: Callable[[], object]


class CompileChildren:
    """At most `CHILDREN` such processes, started when the first grammar comes, and again after one had to be killed. Thread-safe; each
    compiles one grammar at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._told = (vocabulary.texts, vocabulary.stops)
        self._idle: Queue[_Running | PagodaError] = Queue()
        self._all: list[_Running] = []
        self._lock, self._large = Lock(), Lock()
        self._count = 0
        self._closed = False
        self._given_up: OrderedDict[bytes, None] = OrderedDict()

    def compile(self, kind: str, source: str, blanks: bool, origin: str) -> str:
        """A serialized grammar. Raises `RequestError` for what xgrammar does not take, or takes too much time or memory for."""
        key = blake2b(repr((kind, source, blanks)).encode(), digest_size=16).digest()
        with self._lock:
            if key in self._given_up:
                self._given_up.move_to_end(key)
                raise _too_much(origin)
        answer = self._ask(key, (kind, source, blanks, min(MOST_TAKE, COMPILE_BYTES)), origin)
        if answer == OUT_OF_MEMORY and MOST_TAKE < COMPILE_BYTES:
            with self._large:
                answer = self._ask(key, (kind, source, blanks, COMPILE_BYTES), origin)
        if answer == OUT_OF_MEMORY:
            self._remember(key)
        if answer is None or answer == OUT_OF_MEMORY:
            raise _too_much(origin)
        well, text = answer
        if not well:
            raise RequestError(f"it cannot be followed: {_LOG_HEAD.sub('', text).strip()[:400]}", param=origin)
        return str(text)

    def _ask(self, key: bytes, asked: tuple[str, str, bool, int], origin: str) -> tuple[bool, str] | None:
        for _ in range(2):  # a compiler may have been ended by somebody else
            running = self._take(origin)
            answer = _answer(running.child, asked, COMPILE_SECONDS)
            if answer is not None:
                self._idle.put(running)
                return answer
            slow = running.child.process.poll() is None
            self._end(running)
            if slow:
                break
        self._remember(key)
        return None

    @property
    def processes(self) -> list[int]:
        """The ids of those that run."""
        with self._lock:
            return [running.child.process.pid for running in self._all]

    def close(self) -> None:
        """End them all; idempotent. They end by themselves where this process does."""
        with self._lock:
            self._closed, ended, self._all = True, self._all, []
        for running in ended:
            running.end()

    def _take(self, origin: str) -> _Running:
        self._start_missing()
        try:
            taken = self._idle.get(timeout=START_SECONDS)
        except Empty:
            raise RequestError("the compilers of grammars are busy with others; try again later", param=origin) from None
        if isinstance(taken, PagodaError):
            raise taken
        return taken

    def _start_missing(self) -> None:
        """One after another, beside whoever asks: the first is of use before the second is there."""
        with self._lock:
            missing, self._count = CHILDREN - self._count, CHILDREN
        if missing:
            Thread(target=self._start, args=(missing,), name="starts compilers", daemon=True).start()

    def _start(self, missing: int) -> None:
        for left in range(missing, 0, -1):
            child = Child(_TARGET, "a compiler of grammars", ("xgrammar",))
            running = _Running(child, weakref.finalize(self, child.kill))
            ready = _answer(child, self._told, START_SECONDS) is not None
            with self._lock:
                if ready and not self._closed:
                    self._all.append(running)
                    self._idle.put(running)
                    continue
                self._count -= left
            if not ready:
                self._idle.put(child.death())
            running.end()
            return

    def _end(self, running: _Running) -> None:
        running.end()
        with self._lock:
            if running in self._all:
                self._all.remove(running)
            self._count -= 1
        self._start_missing()

    def _remember(self, key: bytes) -> None:
        with self._lock:
            self._given_up[key] = None
            while len(self._given_up) > REMEMBERED:
                self._given_up.popitem(last=False)


def _too_much(origin: str) -> RequestError:
    return RequestError(
        f"the grammar was not compiled within {COMPILE_SECONDS:.0f} s and {COMPILE_BYTES >> 30} GiB; make it simpler", param=origin
    )


def _answer(child: Child, message: Any, seconds: float) -> tuple[bool, str] | None:
    try:
        child.connection.send(message)
        answer: tuple[bool, str] | None = child.connection.recv() if child.connection.poll(seconds) else None
    except (EOFError, OSError):
        return None
    return answer


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """In the child: the vocabulary, then sources with the bytes that each may take, answered by (True, serialized) or (False, error)."""
    told = inbox.get()
    if told is None:
        return 0
    texts, stops = told
    compiler = import_module("xgrammar").GrammarCompiler(token_info(texts, stops), max_threads=1, cache_enabled=False)
    begun = _size()
    outbox.send((True, ""))
    while (asked := inbox.get()) is not None:
        *source, most = asked
        if begun is not None:
            resource.setrlimit(resource.RLIMIT_AS, (begun + most, resource.getrlimit(resource.RLIMIT_AS)[1]))
        try:
            outbox.send((True, compile_source(compiler, *source)))
        except Exception as error:  # the library raises its own and bare ones
            outbox.send(OUT_OF_MEMORY if "bad_alloc" in str(error) else (False, str(error)))
        heap.trim()  # of what a grammar at the limit took, the library's heap would keep all
    return 0


def _size() -> int | None:
    """Bytes of addresses that this process has; None on systems that do not say, which have the limit of time alone."""
    sizes = Path("/proc/self/statm")
    return int(sizes.read_text().split()[0]) * resource.getpagesize() if sizes.is_file() else None
