"""Llama 3.2 and 4, LFM 2 and OLMo 3: Python calls, `[weather(city="Rome", days=2)]` or one a line; each is told when it is whole."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_value

START, END = "<|python_start|>", "<|python_end|>"
LINES, LINES_END = "<function_calls>", "</function_calls>"
LIST, LIST_END = "<|tool_call_start|>", "<|tool_call_end|>"
_JSON_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}


def _script(flow: Flow) -> Script[None]:
    flow.hold()
    yield from flow.skip_space()
    if (yield from flow.peek()) == "[":
        yield from _calls(flow)
    yield from _listed(START, END)(flow)


def _listed(start: str, end: str) -> Callable[[Flow], Script[None]]:
    def script(flow: Flow) -> Script[None]:
        while (yield from flow.plain(Content, start)):
            yield from flow.skip_space()
            if (yield from flow.peek()) == "[" and (yield from _calls(flow)):
                yield from flow.skip_space()
                yield from flow.close(end)

    return script


def _lines(flow: Flow) -> Script[None]:
    """A call a line between the marks."""
    while (yield from flow.plain(Content, LINES)):
        yield from flow.skip_space()
        while (yield from _call(flow)):
            flow.hold()
            yield from flow.skip_space()
            if (yield from flow.eat(LINES_END)):
                flow.drop()
                break


def _calls(flow: Flow) -> Script[bool]:
    yield from flow.eat("[")
    while True:
        yield from flow.skip_space()
        if not (yield from _call(flow)):
            return False
        flow.hold()
        yield from flow.skip_space()
        if not (yield from flow.eat(",")):
            break
    well = bool((yield from flow.eat("]")))
    if well:
        flow.drop()
    return well


def _call(flow: Flow) -> Script[bool]:
    name = yield from _word(flow)
    if name not in flow.context.tools or (yield from flow.peek()) != "(":
        return False
    arguments = _arguments((yield from read_value(flow, quotes="\"'")))
    if arguments is None:
        return False
    flow.call(name)
    flow.arguments(json.dumps(arguments, ensure_ascii=False))
    return True


def _word(flow: Flow) -> Script[str]:
    word = ""
    while (char := (yield from flow.peek())) and (char.isalnum() or char in "_.-"):
        word += flow.take(1)
    return word


def _arguments(text: str | None) -> dict[str, Any] | None:
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return {str(word.arg): _value(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {ast.literal_eval(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    return ast.literal_eval(node)


def _shape(before: str, between: str, after: str, *marks: str) -> CallShape:
    return CallShape("", "NAME(", ")", before, between, after, marks[0] if marks else "", marks, True, "python")


PYTHONIC = Family(
    "tools",
    ("pythonic", "llama4_pythonic"),
    scripted(_script),
    signs=(START, "[func_name1("),
    marks=(START, END),
    shapes=(_shape("[", ", ", "]"),),
)
LFM2 = Family(
    "tools",
    ("lfm2",),
    scripted(_listed(LIST, LIST_END)),
    signs=(LIST,),
    marks=(LIST, LIST_END),
    shapes=(_shape(f"{LIST}[", ", ", f"]{LIST_END}", LIST, LIST_END),),
)
OLMO3 = Family(
    "tools",
    ("olmo3",),
    scripted(_lines),
    signs=(LINES,),
    marks=(LINES, LINES_END),
    shapes=(_shape(f"{LINES}\n", "\n", f"\n{LINES_END}", LINES, LINES_END),),
)
