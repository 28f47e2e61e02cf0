"""DeepSeek V3 and V3.1: calls between marks, `function⟨sep⟩name` with a fenced object, or `name⟨sep⟩` with a bare one."""

from __future__ import annotations

from pagoda.serving.frontend.parsers.events import Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_arguments

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def _script(flow: Flow) -> Script[None]:
    while mark := (yield from flow.plain(Content, CALLS, CALL)):
        if mark == CALLS:
            yield from flow.skip_space()
            mark = yield from flow.eat(CALL)
        while mark == CALL and (yield from _call(flow)):
            flow.hold()
            yield from flow.skip_space()
            mark = yield from flow.eat(CALL, CALLS_END)
        if mark == CALLS_END:
            flow.drop()


def _call(flow: Flow) -> Script[bool]:
    header = yield from flow.upto("{", CALL_END)
    name = _name(header or "")
    if not name or (yield from flow.peek()) != "{":
        return False
    flow.call(name)
    yield from read_arguments(flow, flow.arguments)
    yield from flow.upto(CALL_END)
    yield from flow.eat(CALL_END)
    return True


def _name(header: str) -> str:
    kind, separator, rest = header.partition(SEPARATOR)
    named = rest.strip().partition("\n")[0].strip()
    return "" if not separator else named or kind.strip()


MARKS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
DEEPSEEK = Family("tools", ("deepseek_v3", "deepseek_v31"), scripted(_script), signs=(CALLS, CALL), marks=MARKS)
