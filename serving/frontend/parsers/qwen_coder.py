"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`; values are text, typed by the tool."""

from __future__ import annotations

import json
from typing import Any

from pagoda.serving.frontend.parsers.events import Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def _script(flow: Flow) -> Script[None]:
    while mark := (yield from flow.plain(Content, START, FUNCTION)):
        if mark == START:
            yield from flow.skip_space()
            mark = yield from flow.eat(FUNCTION)
        name = (yield from flow.upto(">")) if mark else None
        if not name:
            continue
        flow.call(name.strip())
        flow.take(1)
        yield from _parameters(flow, flow.context.tools.get(name.strip(), {}))
        yield from flow.skip_space()
        yield from flow.eat(END)


def _parameters(flow: Flow, schema: Any) -> Script[None]:
    between = "{"
    while True:
        yield from flow.skip_space()
        if not (mark := (yield from flow.eat(PARAMETER, FUNCTION_END))):
            return
        if mark == FUNCTION_END:
            return flow.arguments("{}" if between == "{" else "}")
        key = yield from flow.upto(">")
        flow.take(1)
        text = yield from flow.upto(PARAMETER_END)
        if key is None or text is None:
            return
        flow.take(len(PARAMETER_END))
        value = json.dumps(_typed(text.removeprefix("\n").removesuffix("\n"), schema, key.strip()), ensure_ascii=False)
        flow.arguments(f"{between}{json.dumps(key.strip(), ensure_ascii=False)}: {value}")
        between = ", "


def _typed(text: str, schema: Any, key: str) -> Any:
    kind = ((schema.get("properties") or {}).get(key) or {}).get("type", "string")
    if kind == "string":
        return text
    for spelling in (text, text.strip().lower()):  # Python's True and None
        try:
            return json.loads("null" if spelling == "none" else spelling)
        except ValueError:
            continue
    return text


QWEN_CODER = Family("tools", ("qwen3_coder", "qwen3_xml"), scripted(_script), signs=(FUNCTION,), marks=(START, END))
