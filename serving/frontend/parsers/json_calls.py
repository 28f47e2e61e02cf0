"""Tool calls as JSON objects, `{"name": …, "arguments": {…}}`, alone, in lists, or in a row; arguments stream as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pagoda.serving.frontend.parsers.events import Content
from pagoda.serving.frontend.parsers.flow import Flow, Script

ARGUMENTS = ("arguments", "parameters", "args")
NAMES = ("name", "tool_name")
KEYS = (*ARGUMENTS, *NAMES, "type", "id")


class Extent:
    """Finds the end of one value of JSON, or of Python's literals, in text that comes in pieces."""

    def __init__(self, quotes: str = '"') -> None:
        self._quotes = quotes
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._scalar = False

    def scan(self, text: str) -> int | None:
        """Where the value ends in the next piece; None when it goes on."""
        for at, char in enumerate(text):
            if self._scalar and (char.isspace() or char in ",}])"):
                return at
            if self._step(char):
                return at + 1
        return None

    def _step(self, char: str) -> bool:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
                return self._depth == 0
        elif char in self._quotes:
            self._quote = char
        elif char in "{[(":
            self._depth += 1
        elif char in "}])":
            self._depth -= 1
            return self._depth <= 0
        elif self._depth == 0:
            self._scalar = True
        return False


def read_value(flow: Flow, say: Callable[[str], None] | None = None, quotes: str = '"') -> Script[str | None]:
    """Read one value's text, telling `say` its pieces as they come; None when the answer ends first."""
    yield from flow.skip_space()
    extent, raw = Extent(quotes), ""
    while True:
        end = extent.scan(flow.text)
        piece = flow.take(len(flow.text) if end is None else end)
        raw += piece
        if say is not None:
            say(piece)
        if end is not None:
            return raw
        if not (yield from flow.more()):
            return None


def read_arguments(flow: Flow, say: Callable[[str], None]) -> Script[bool]:
    """Arguments as an object stream; those written as a JSON text are unwrapped, none at all are `{}`."""
    yield from flow.skip_space()
    if (yield from flow.peek()) == "{":
        return (yield from read_value(flow, say)) is not None
    raw = yield from read_value(flow)
    value = parsed(raw)
    if raw is None or value is _NOTHING:
        return False
    say(value if isinstance(value, str) else "{}" if value is None else raw)
    return True


def read_call(flow: Flow, known_only: bool = False) -> Script[bool]:
    """Read one object; says whether it was a whole call. `known_only`: other keys, and names that are not offered, make it none.

    As soon as the name is known the call begins; arguments that come before it wait.
    """
    call = _Call(flow, known_only)
    if not (yield from flow.eat("{")):
        return False
    while True:
        key = parsed((yield from read_value(flow)))
        yield from flow.skip_space()
        if not isinstance(key, str) or (known_only and key not in KEYS):
            return False
        if not (yield from flow.eat(":")) or not (yield from _member(flow, key, call)):
            return False
        yield from flow.skip_space()
        if not (yield from flow.eat(",")):
            break
    return bool((yield from flow.eat("}"))) and call.end()


def _member(flow: Flow, key: str, call: _Call) -> Script[bool]:
    if key in ARGUMENTS:
        return (yield from read_arguments(flow, call.arguments))
    value = parsed((yield from read_value(flow)))
    return call.name(value) if key in NAMES else value is not _NOTHING


class _Call:
    def __init__(self, flow: Flow, known_only: bool) -> None:
        self._flow, self._known_only = flow, known_only
        self._named = self._argued = False
        self._waiting = ""

    def name(self, name: Any) -> bool:
        if not isinstance(name, str) or not name or self._named or (self._known_only and name not in self._flow.context.tools):
            return False
        self._named = True
        self._flow.call(name)
        self._flow.arguments(self._waiting)
        return True

    def arguments(self, text: str) -> None:
        self._argued = True
        if self._named:
            self._flow.arguments(text)
        else:
            self._waiting += text

    def end(self) -> bool:
        if self._named and not self._argued:
            self._flow.arguments("{}")
        return self._named


def read_calls(flow: Flow, known_only: bool = False) -> Script[bool]:
    """Read a list of calls, or calls in a row; says whether all was well."""
    yield from flow.skip_space()
    listed = yield from flow.eat("[")
    while True:
        yield from flow.skip_space()
        if not (yield from read_call(flow, known_only)):
            return False
        yield from flow.skip_space()
        between = yield from flow.eat(",", ";")
        if not between and (listed or (yield from flow.peek()) != "{"):
            break
    return not listed or bool((yield from flow.eat("]")))


def marked(starts: tuple[str, ...], ends: tuple[str, ...] = ()) -> Callable[[Flow], Script[None]]:
    """A script for calls that stand behind a mark, and before another where the family has one."""

    def script(flow: Flow) -> Script[None]:
        while (yield from flow.plain(Content, *starts)):
            before = flow.calls
            yield from read_calls(flow)
            if ends and flow.calls > before:
                slip = yield from flow.upto(*ends, *starts)
                if slip is None and (slip := flow.before_cut(*ends, *starts)) is not None:
                    flow.text = slip
                yield from flow.eat(*ends)

    return script


_NOTHING = object()


def parsed(raw: str | None) -> Any:
    """The value of JSON text; an object that is no JSON value when it is none."""
    try:
        return _NOTHING if raw is None else json.loads(raw)
    except ValueError:
        return _NOTHING
