"""GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>…</tool_call>`; values are typed by the tool."""

from __future__ import annotations

import json
import re

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.tagged import typed

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.:/-]+")


def _script(flow: Flow) -> Script[None]:
    while (yield from flow.plain(Content, START)):
        found = yield from flow.upto(KEY, END)
        name = (flow.take(len(flow.before_cut(END) or "")) if found is None else found).strip()
        if not _NAME.fullmatch(name):
            continue
        flow.call(name)
        yield from _arguments(flow, name)
        yield from flow.skip_space()
        yield from flow.close(END, KEY)


def _arguments(flow: Flow, name: str) -> Script[None]:
    schema, between = flow.context.tools.get(name, {}), "{"
    yield from flow.skip_space()
    while (yield from flow.eat(KEY)):
        key = yield from flow.upto(KEY_END)
        yield from flow.upto(VALUE)
        yield from flow.eat(VALUE)
        text = yield from flow.upto(VALUE_END)
        if key is None or text is None:
            return flow.cut()
        yield from flow.eat(VALUE_END)
        key = key.strip()
        value = json.dumps(typed(text, schema, key), ensure_ascii=False)
        flow.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
        between = ", "
        yield from flow.skip_space()
    if flow.text.startswith(END) or not flow.ended or flow.cut_in(END, KEY):
        flow.arguments("{}" if between == "{" else "}")


_SHAPE = CallShape(START, "NAME", END, between="\n", trigger=START, marks=(START, END), bare_name=True, style="glm_xml")
GLM = Family(
    "tools",
    ("glm45", "glm47"),
    scripted(_script),
    signs=(KEY,),
    marks=(START, END, KEY, KEY_END, VALUE, VALUE_END),
    shapes=(_SHAPE,),
)
