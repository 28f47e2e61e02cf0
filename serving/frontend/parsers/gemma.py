"""FunctionGemma and Gemma 4: `call:NAME{key:value,…}` between marks, with strings between marks of their own."""

from __future__ import annotations

import json
import re
from typing import Any

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.thinking import thinking

_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_BARE = re.compile(r"[^,}\]]*")


def _script(start: str, end: str, quote: str) -> Any:
    def script(flow: Flow) -> Script[None]:
        while (yield from flow.plain(Content, start)):
            body = yield from flow.upto(end)
            text = (flow.before_cut(end) or "") if body is None else body
            head = _CALL.match(text)
            arguments = _Values(text, head.end(), quote).whole() if head else None
            if head is None or arguments is None:
                continue
            flow.call(head.group(1))
            flow.arguments(json.dumps(arguments, ensure_ascii=False))
            flow.cut() if body is None else (yield from flow.eat(end))

    return script


class _Values:
    """Reads values at a place in a text; a `ValueError` where there is none."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text, self._at, self._quote = text, at, quote

    def whole(self) -> Any:
        """The object that the rest of the text is; None when it is none."""
        try:
            value = self._value()
        except (ValueError, RecursionError):
            return None
        return value if not self._text[self._at :].strip() else None

    def _value(self) -> Any:
        self._space()
        if self._eat(self._quote):
            end = self._text.index(self._quote, self._at)
            text, self._at = self._text[self._at : end], end + len(self._quote)
            return text
        if self._eat("{"):
            return dict(self._items("}", self._pair))
        if self._eat("["):
            return self._items("]", self._value)
        bare = _BARE.match(self._text, self._at)
        assert bare is not None
        self._at = bare.end()
        return json.loads(bare.group().strip().lower())

    def _items(self, end: str, read: Any) -> list[Any]:
        items: list[Any] = []
        self._space()
        while not self._eat(end):
            if items and not self._eat(","):
                raise ValueError(self._text)
            items.append(read())
            self._space()
        return items

    def _pair(self) -> tuple[str, Any]:
        colon = self._text.index(":", self._at)
        key, self._at = self._text[self._at : colon].replace(self._quote, "").strip(), colon + 1
        return key, self._value()

    def _space(self) -> None:
        self._at = len(self._text) - len(self._text[self._at :].lstrip())

    def _eat(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) * found
        return found


def _family(name: str, start: str, end: str, quote: str) -> Family:
    marks = (start, end, quote)
    shape = CallShape(f"{start}call:", "NAME{", f"}}{end}", trigger=start, marks=marks, bare_name=True, style="gemma", quote=quote)
    return Family("tools", (name,), scripted(_script(start, end, quote)), signs=(start,), marks=marks, shapes=(shape,))


FUNCTION_GEMMA = _family("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = _family("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
CHANNEL, CLOSE = "<|channel>", "<channel|>"
THOUGHTS = scripted(thinking((f"{CHANNEL}thought",), (CLOSE,)))
GEMMA4_REASONING = Family("reasoning", ("gemma4",), THOUGHTS, signs=(CHANNEL,), marks=(CHANNEL, CLOSE))
