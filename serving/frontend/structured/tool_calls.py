"""What an answer may look like when tools are offered: a structural tag in the shape that the model's family writes calls in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pagoda.serving.frontend.parsers.events import CallShape
from pagoda.serving.frontend.structured.keyed import STYLES, Format, Keyed, any_of, in_a_row, text
from pagoda.serving.frontend.text import Tokenizer

ANY = {"type": "object"}


class OfferedTool(NamedTuple):
    """A tool as the grammar sees it: `schema` of its arguments; None where they may be any object."""

    name: str
    schema: Mapping[str, Any] | None


def calls_tag(
    shape: CallShape,
    tools: Sequence[OfferedTool],
    tokenizer: Tokenizer,
    *,
    forced: bool,
    parallel: bool,
    content: Format | None,
    param: str,
) -> str:
    """The structural tag's text.

    Args:
        shape: how calls are written. tools: those that may be called.
        forced: the answer is calls. parallel: several of them.
        content: what the answer may be instead of calls, where that is not any text. param: the request's field, for errors.
    """
    writer = _Calls(shape, tokenizer, param)
    calls = writer.calls(tools, parallel)
    if shape.final:
        made = writer.after_sayings([calls] if forced else [calls, writer.final(content)])
    elif forced:
        made = calls
    elif content is not None:
        made = {"type": "or", "elements": [calls, content]}
    else:
        made = writer.within_text(tools, parallel)
    return json.dumps({"type": "structural_tag", "format": made})


class _Calls:
    def __init__(self, shape: CallShape, tokenizer: Tokenizer, param: str) -> None:
        self._shape, self._param = shape, param
        self._marks = {mark: token for mark in shape.marks if (token := _special(mark, tokenizer)) is not None}

    def calls(self, tools: Sequence[OfferedTool], parallel: bool) -> Format:
        shape = self._shape
        one = in_a_row([*self._pieces(shape.open), any_of([self._call(tool) for tool in tools]), *self._pieces(shape.close)])
        between = self._pieces(shape.between)
        more = [{"type": "star", "content": in_a_row([*between, one])}] if parallel else []
        return in_a_row([*self._pieces(shape.before), one, *more, *self._pieces(shape.after)])

    def after_sayings(self, rest: list[Format]) -> Format:
        """One of `rest`, and before it what may be said in other channels."""
        said = any_of([self._saying(*ends) for ends in self._shape.sayings])
        return in_a_row([{"type": "star", "content": said}, any_of(rest)])

    def final(self, content: Format | None) -> Format:
        """An answer without calls."""
        return in_a_row([*self._pieces(self._shape.final), content or {"type": "any_text"}])

    def _saying(self, begin: str, end: str) -> Format:
        *before, first = self._pieces(begin)
        last, *after = self._pieces(end)
        marks = {"begin": first["value"] if first["type"] == "const_string" else first}
        marks["end"] = last["value"] if last["type"] == "const_string" else last
        return in_a_row([*before, {"type": "tag", **marks, "content": {"type": "any_text"}}, *after])

    def within_text(self, tools: Sequence[OfferedTool], parallel: bool) -> Format:
        """Any text, and calls where a mark begins them; without a mark, calls alone or a text that does not begin as they do."""
        trigger, listed = self._shape.trigger, bool(self._shape.after)
        calls = self.calls(tools, parallel and listed)  # what has no end of its own comes call by call
        if not trigger:
            calls = self.calls(tools, parallel)
            return {"type": "or", "elements": [calls, {"type": "regex", "pattern": r"([^{\[\s](.|\n)*)?"}]}
        first, *rest = calls["elements"]
        if trigger in self._marks:
            begin: str | Format = first
            kind, triggers = "token_triggered_tags", {"trigger_tokens": [self._marks[trigger]]}
        else:
            head, begin = first, trigger
            if left := head["value"][len(trigger) :]:
                rest = [text(left), *rest]
            kind, triggers = "triggered_tags", {"triggers": [trigger]}
        end: str | Format = ""
        if rest[-1]["type"] in ("const_string", "token"):
            last = rest.pop()
            end = last["value"] if last["type"] == "const_string" else last
        tag = {"type": "tag", "begin": begin, "content": in_a_row(rest), "end": end}
        return {"type": kind, **triggers, "tags": [tag], "at_least_one": False, "stop_after_first": listed or not parallel}

    def _call(self, tool: OfferedTool) -> Format:
        name = tool.name if self._shape.bare_name else json.dumps(tool.name, ensure_ascii=False)[1:-1]
        given = dict(ANY if tool.schema is None else tool.schema)
        head = self._pieces(self._shape.head.replace("NAME", name))
        if self._shape.style in STYLES:
            return in_a_row([*head, Keyed(self._shape, self._pieces, self._param).arguments(given)])
        schema: Format = {"type": "json_schema", "json_schema": given}
        if self._shape.style != "json":
            schema["style"] = self._shape.style
        return in_a_row([*head, schema])

    def _pieces(self, given: str) -> list[Format]:
        """A text whose marks are special tokens in it."""
        if not self._marks:
            return [text(given)] if given else []
        parts = re.split("(" + "|".join(map(re.escape, self._marks)) + ")", given)
        return [{"type": "token", "token": self._marks[part]} if part in self._marks else text(part) for part in parts if part]


def _special(mark: str, tokenizer: Tokenizer) -> int | None:
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None
