"""xgrammar's compiler in a process of its own, which a hostile grammar can neither make wait for ever nor eat the engine's memory."""

from __future__ import annotations

import re
import resource
import weakref
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from pagoda.hal import heap
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.child import Child, Inbox, Outbox
from pagoda.serving.frontend.structured.vocabulary import Vocabulary
from pagoda.serving.frontend.structured.xgrammar_backend import compile_source, token_info

COMPILE_SECONDS = 15.0
START_SECONDS = 120.0
COMPILE_BYTES = 2 << 30
"""What the compiler may take beyond what it has when it begins."""

OUT_OF_MEMORY = (False, "out of memory")
_LOG_HEAD = re.compile(r"^\[\S*\] \S+:\d+: ")
_TARGET = "pagoda.serving.frontend.structured.compile_child:serve"


class CompileChild:
    """One such process, started when first needed, and again after it had to be killed. Thread-safe; one grammar at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._told = (vocabulary.texts, vocabulary.stops, COMPILE_BYTES)
        self._lock = Lock()
        self._child: Child | None = None

    def compile(self, kind: str, source: str, blanks: bool, origin: str) -> str:
        """A serialized grammar. Raises `RequestError` for what xgrammar does not take, or takes too much time or memory for."""
        with self._lock:
            child = self._child or self._start()
            self._child = None
            answer = _answer(child, (kind, source, blanks), COMPILE_SECONDS)
            if answer is None:
                child.kill()
            else:
                self._child = child
        if answer is None or answer == OUT_OF_MEMORY:
            raise RequestError(
                f"the grammar was not compiled within {COMPILE_SECONDS:.0f} s and {COMPILE_BYTES >> 30} GiB; make it simpler", param=origin
            )
        well, text = answer
        if not well:
            raise RequestError(f"it cannot be followed: {_LOG_HEAD.sub('', text).strip()[:400]}", param=origin)
        return str(text)

    @property
    def process(self) -> int | None:
        """The id of the one that waits for grammars."""
        return None if self._child is None else self._child.process.pid

    def _start(self) -> Child:
        child = Child(_TARGET, "the compiler of grammars", ("xgrammar",))
        if _answer(child, self._told, START_SECONDS) is None:
            raise child.death()
        weakref.finalize(self, child.kill)
        return child


def _answer(child: Child, message: Any, seconds: float) -> tuple[bool, str] | None:
    try:
        child.connection.send(message)
        answer: tuple[bool, str] | None = child.connection.recv() if child.connection.poll(seconds) else None
    except (EOFError, OSError):
        return None
    return answer


def serve(inbox: Inbox, outbox: Outbox) -> int:
    """In the child: the vocabulary and what a grammar may take, then sources, each answered by (True, serialized) or (False, error)."""
    told = inbox.get()
    if told is None:
        return 0
    texts, stops, most = told
    compiler = import_module("xgrammar").GrammarCompiler(token_info(texts, stops), max_threads=1, cache_enabled=False)
    _bound_memory(most)
    outbox.send((True, ""))
    while (asked := inbox.get()) is not None:
        try:
            outbox.send((True, compile_source(compiler, *asked)))
        except Exception as error:  # the library raises its own and bare ones
            outbox.send(OUT_OF_MEMORY if "bad_alloc" in str(error) else (False, str(error)))
        heap.trim()  # of what a grammar at the limit took, the library's heap would keep all
    return 0


def _bound_memory(most: int) -> None:
    sizes = Path("/proc/self/statm")
    if sizes.is_file():  # other systems have the limit of time alone
        now = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + most,) * 2)
