"""DeepSeek V3 and Kimi K2: a section of calls between marks, each a header with the tool's name, then its arguments as an object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_arguments

FENCE = "`\n "
"""V3 writes arguments as a block of code."""


@dataclass(frozen=True)
class Sections:
    """The marks of one family; `name`: the tool's name out of a header, empty when there is none."""

    calls: str
    calls_end: str
    call: str
    call_end: str
    name: Callable[[str], str]


def sectioned(marks: Sections) -> Callable[[Flow], Script[None]]:
    """The script of one family."""

    def script(flow: Flow) -> Script[None]:
        while mark := (yield from flow.plain(Content, marks.calls, marks.call)):
            if mark == marks.calls:
                yield from flow.skip_space()
                mark = yield from flow.eat(marks.call)
            while mark == marks.call and (yield from _call(flow, marks)):
                flow.hold()
                yield from flow.skip_space()
                mark = yield from flow.eat(marks.call, marks.calls_end)
            if mark == marks.calls_end:
                flow.drop()

    return script


def _call(flow: Flow, marks: Sections) -> Script[bool]:
    header = yield from flow.upto("{", marks.call_end)
    name = marks.name(header or "")
    if not name or (yield from flow.peek()) != "{":
        return False
    flow.call(name)
    yield from read_arguments(flow, flow.arguments)
    if (yield from flow.upto(marks.call_end)) is None:
        rest = flow.before_cut(marks.call_end)
        flow.text = (flow.text if rest is None else rest).lstrip(FENCE)
    yield from flow.close(marks.call_end)
    return True


SEPARATOR = "<｜tool▁sep｜>"


def _deepseek_name(header: str) -> str:
    """Out of V3's `function⟨sep⟩name` and a fence, or V3.1's `name⟨sep⟩`."""
    kind, separator, rest = header.partition(SEPARATOR)
    named = rest.strip().partition("\n")[0].strip()
    return "" if not separator else named or kind.strip()


ARGUMENTS = "<|tool_call_argument_begin|>"


def _kimi_name(header: str) -> str:
    """Out of `functions.name:0⟨arguments⟩`."""
    kind, separator, _ = header.partition(ARGUMENTS)
    return kind.strip().removeprefix("functions.").rpartition(":")[0] if separator else ""


def _family(names: tuple[str, ...], marks: Sections, separator: str, head: str) -> Family:
    every = (marks.calls, marks.calls_end, marks.call, marks.call_end, separator)
    around = {"before": marks.calls, "after": marks.calls_end, "trigger": marks.calls}
    shape = CallShape(marks.call, head + separator, marks.call_end, marks=every, bare_name=True, **around)
    return Family("tools", names, scripted(sectioned(marks)), signs=(marks.calls, marks.call), marks=every, shapes=(shape,))


DEEPSEEK = _family(
    ("deepseek_v3", "deepseek_v31"),
    Sections("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_name),
    SEPARATOR,
    "NAME",
)
KIMI = _family(
    ("kimi_k2",),
    Sections("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", _kimi_name),
    ARGUMENTS,
    "functions.NAME:0",
)
