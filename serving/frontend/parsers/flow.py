"""Text that comes in pieces, read by scripts that need not care: a generator that yields whenever it needs more."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Context, Event, Kind, Parser

T = TypeVar("T")
Script = Generator[None, None, T]
"""Yields when it has read all text that there is; returns a T."""


class Flow:
    """One answer: its unread text, and the events so far.

    Between `hold` and `drop` all that is read is kept, so that `release` can give it out as content when it was no call. What the end of
    an answer cuts off after its first call is none, nor before it where a call is forced: a token limit must not show half of a mark.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.text = ""
        self.ended = False
        self.events: list[Event] = []
        self.calls = 0
        self._held: str | None = None

    def more(self) -> Script[bool]:
        """Wait for more text; False at the end of the answer."""
        before = len(self.text)
        while len(self.text) == before and not self.ended:
            yield
        return len(self.text) > before

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        if self._held is not None:
            self._held += taken
        return taken

    def unread(self, mark: str) -> None:
        """Put back what was read last, so that it is read again."""
        self.text = mark + self.text

    def hold(self) -> None:
        self._held = self._held or ""

    def drop(self) -> None:
        self._held = None

    def cut(self) -> None:
        """The answer ended within calls: what is unread or held was the beginning of something that nobody shall see."""
        self.text, self._held = "", None

    def cut_in(self, mark: str, other: str = "") -> bool:
        """Whether the answer ended within this mark, and not within one that begins alike."""
        return self.ended and bool(self.text) and mark.startswith(self.text) and not other.startswith(self.text)

    def before_cut(self, *marks: str) -> str | None:
        """What is unread before the beginning of a mark at the end of the answer, and before the space there; None without such a one."""
        safe = _safe(self.text, marks)
        return self.text[:safe] if self.text[safe:].strip() else None

    @property
    def calling(self) -> bool:
        """Whether what is cut off now belongs to calls."""
        return self.calls > 0 or self.context.forced

    def release(self, kind: Kind | None = Content) -> None:
        if self.ended and self.calling and self._held is not None:
            return self.cut()
        held, self._held = self._held, None
        self.say(kind, held or "")

    def say(self, kind: Kind | None, text: str) -> None:
        """None: to nobody."""
        if text and kind is not None:
            self.events.append(kind(text))

    def call(self, name: str) -> None:
        """A call begins: what was held belonged to it."""
        self.drop()
        self.events.append(CallName(self.calls, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Of the call that began last."""
        if text:
            self.events.append(CallArguments(self.calls - 1, text))

    def peek(self) -> Script[str]:
        """The next character, unread; empty at the end."""
        if not self.text:
            yield from self.more()
        return self.text[:1]

    def skip_space(self) -> Script[None]:
        while (yield from self.peek()).isspace():
            self.take(len(self.text) - len(self.text.lstrip()))

    def eat(self, *marks: str) -> Script[str]:
        """Read whichever mark comes next, the longest that fits; empty when none does."""
        while any(mark.startswith(self.text) and mark != self.text for mark in marks):
            if not (yield from self.more()):
                break
        found = max((mark for mark in marks if self.text.startswith(mark)), key=len, default="")
        return self.take(len(found))

    def close(self, *marks: str) -> Script[str]:
        """`eat`, of what ends a call; the beginning of a mark is read as well where the answer is cut there."""
        found = yield from self.eat(*marks)
        if not found and self.ended and any(mark.startswith(self.text) for mark in marks):
            self.cut()
        return found

    def upto(self, *marks: str) -> Script[str | None]:
        """Read the text before the first mark, which stays unread; None when none comes."""
        while (at := _first(self.text, marks)) is None:
            if not (yield from self.more()):
                return None
        return self.take(at)

    def plain(self, kind: Kind | None, *marks: str) -> Script[str]:
        """Say all text up to the first mark, and read that; empty at the end of the answer.

        What is still held comes first. The mark, and the space before it, are not said but held.
        """
        self.release()
        while (at := _first(self.text, marks)) is None:
            self.say(kind, self.take(_safe(self.text, marks)))
            if not (yield from self.more()):
                self.say(kind, self._tail(marks))
                return ""
        before = self.text[:at].rstrip()
        self.say(kind, self.take(len(before)))
        self.hold()
        self.take(at - len(before))
        return (yield from self.eat(*marks))

    def _tail(self, marks: Sequence[str]) -> str:
        tail = self.take(len(self.text))
        return "" if self.calling and any(mark.startswith(tail.lstrip()) for mark in ("", *marks)) else tail


def _first(text: str, marks: Sequence[str]) -> int | None:
    return min((at for mark in marks if (at := text.find(mark)) >= 0), default=None)


def _safe(text: str, marks: Sequence[str]) -> int:
    """How much of `text` can be neither the beginning of a mark nor the space before one."""
    if not marks:
        return len(text)
    longest = max(map(len, marks))
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            text = text[:start]
            break
    return len(text.rstrip())


class ScriptParser:
    """A script as a parser: text that it leaves unread is content."""

    def __init__(self, script: Callable[[Flow], Script[None]], context: Context) -> None:
        self._flow = Flow(context)
        self._run = _whole(script, self._flow)

    def feed(self, text: str) -> list[Event]:
        self._flow.text += text
        return self._advance()

    def finish(self) -> list[Event]:
        self._flow.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._run, None)
        events, self._flow.events = self._flow.events, []
        return events


def _whole(script: Callable[[Flow], Script[None]], flow: Flow) -> Script[None]:
    yield from script(flow)
    yield from flow.plain(Content)


def scripted(script: Callable[[Flow], Script[None]]) -> Callable[[Context], Parser]:
    """`Family.make` of a script."""
    return lambda context: ScriptParser(script, context)
