"""MiniMax M3: calls as nested elements, each tag behind `]<]minimax[>[`; a parameter is an element of its own name, a list has items."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.tagged import plain_name, resolved, types_of, valued

MARK = "]<]minimax[>["
START, END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
INVOKE, INVOKE_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
ITEM = "item"
_TAG = re.compile(r"(/?)([^<>/]+)")
_MOST_DEEP = 64


@dataclass
class _Element:
    """One that is read: its text, and its children in their order."""

    name: str
    text: str = ""
    children: list[_Element] = field(default_factory=list)


def _script(flow: Flow) -> Script[None]:
    while mark := (yield from flow.plain(Content, START)):
        yield from flow.skip_space()
        mark = yield from flow.eat(INVOKE)
        while mark and (yield from _call(flow)):
            flow.hold()
            yield from flow.skip_space()
            mark = yield from flow.eat(INVOKE, END)
            if mark == END:
                flow.drop()
                break


def _call(flow: Flow) -> Script[bool]:
    name = plain_name((yield from flow.upto(">")) or "")
    if not name:
        return False
    flow.call(name)
    flow.take(1)
    schema, between = flow.context.tools.get(name, {}), "{"
    while True:
        yield from flow.skip_space()
        if (yield from flow.eat(INVOKE_END)):
            flow.arguments("{}" if between == "{" else "}")
            return True
        if not (yield from flow.eat(f"{MARK}<")):
            return (yield from _slip(flow, between))
        element = yield from _element(flow)
        if element is None:
            flow.cut()
            return True
        given = (resolved(schema, schema).get("properties") or {}).get(element.name)
        value = json.dumps(_value(element, given, schema), ensure_ascii=False)
        flow.arguments(f"{between}{json.dumps(element.name, ensure_ascii=False)}: {value}")
        between = ", "


def _slip(flow: Flow, between: str) -> Script[bool]:
    """What stands where a parameter should be: none of it is told, and the call goes no further."""
    cut = flow.cut_in(INVOKE_END, f"{MARK}<")
    ended = (yield from flow.upto(INVOKE_END)) is not None
    if ended or cut:
        flow.arguments("{}" if between == "{" else "}")
    if ended:
        yield from flow.eat(INVOKE_END)
    else:
        flow.cut()
    return True


def _element(flow: Flow) -> Script[_Element | None]:
    """The rest of an element whose mark and `<` are read; None where the answer ends in it, or it is none."""
    above: list[_Element] = []
    while True:
        found = _TAG.fullmatch((yield from flow.upto(">")) or "")
        if not found or len(above) > _MOST_DEEP:
            return None
        flow.take(1)
        if not found.group(1):
            above.append(_Element(found.group(2).strip()))
        elif not above or above[-1].name != found.group(2).strip():
            return None
        elif len(above) == 1:
            return above[0]
        else:
            above[-2].children.append(above.pop())
        text = yield from flow.upto(f"{MARK}<")
        if text is None:
            return None
        flow.take(len(MARK) + 1)
        above[-1].text += text


def _value(element: _Element, given: Any, root: Any) -> Any:
    """Of the type that the schema gives; without one, elements are an object, or a list where all are items."""
    given = resolved(given, root)
    if not element.children:
        return valued(element.text, types_of(given, root))
    schema = given if isinstance(given, dict) else {}
    types = types_of(schema, root, ())
    if "array" in types or ("object" not in types and all(child.name == ITEM for child in element.children)):
        return [_value(child, schema.get("items"), root) for child in element.children]
    properties = schema.get("properties") or {}
    out: dict[str, Any] = {}
    for child in element.children:
        out[child.name] = _value(child, properties.get(child.name), root)
    if element.text.strip():
        out["$text"] = element.text.strip()
    return out


MINIMAX3 = Family(
    "tools",
    ("minimax_m3",),
    scripted(_script),
    signs=(MARK,),
    marks=(MARK,),
    shapes=(
        CallShape(
            INVOKE,
            'NAME">',
            f"{INVOKE_END}\n",
            before=f"{START}\n",
            after=END,
            trigger=START,
            marks=(MARK,),
            bare_name=True,
            style="minimax_m3_xml",
        ),
    ),
)
