"""DeepSeek V3, Kimi K2, PLaMo 3: a section of calls, each a header with the tool's name between marks, then its arguments as an object."""

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
    """The marks of one family; `name`: the tool's name out of a header, empty when there is none; call_ends: in a row behind a call."""

    calls: str
    calls_end: str
    call: str
    call_ends: tuple[str, ...]
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
    end = marks.call_ends[0]
    header = yield from flow.upto("{", end)
    name = marks.name(header or "")
    if not name or (yield from flow.peek()) != "{":
        return False
    flow.call(name)
    yield from read_arguments(flow, flow.arguments)
    if (yield from flow.upto(end)) is None:
        rest = flow.before_cut(end)
        flow.text = (flow.text if rest is None else rest).lstrip(FENCE)
    for each in marks.call_ends:
        yield from flow.close(each)
        if each != marks.call_ends[-1]:
            yield from flow.skip_space()
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


_PLAMO_NAME = tuple(f"<|plamo:{what}_tool_name:plamo|>" for what in ("begin", "end"))


def _plamo_name(header: str) -> str:
    """Out of `⟨name⟩name⟨end of name⟩⟨arguments⟩…`."""
    name, end, _ = header.partition(_PLAMO_NAME[0])[2].partition(_PLAMO_NAME[1])
    return name.strip() if end else ""


def _family(names: tuple[str, ...], marks: Sections, head: str, inner: tuple[str, ...], opening: str = "") -> Family:
    """`opening`, `head`: what stands between a call's first mark and the name, and from there to the arguments; inner: marks in them."""
    every = (marks.calls, marks.calls_end, marks.call, *marks.call_ends, *inner)
    around = {"before": marks.calls, "after": marks.calls_end, "trigger": marks.calls}
    shape = CallShape(marks.call + opening, head, "".join(marks.call_ends), marks=every, bare_name=True, **around)
    return Family("tools", names, scripted(sectioned(marks)), signs=(marks.calls, marks.call), marks=every, shapes=(shape,))


DEEPSEEK = _family(
    ("deepseek_v3", "deepseek_v31"),
    Sections("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",), _deepseek_name),
    "NAME" + SEPARATOR,
    (SEPARATOR,),
)
KIMI = _family(
    ("kimi_k2",),
    Sections("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", ("<|tool_call_end|>",), _kimi_name),
    "functions.NAME:0" + ARGUMENTS,
    (ARGUMENTS,),
)
_PLAMO_TYPE = ("<|plamo:begin_tool_arguments:plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>")
PLAMO = _family(
    ("plamo3",),
    Sections(
        "<|plamo:begin_tool_requests:plamo|>",
        "<|plamo:end_tool_requests:plamo|>",
        "<|plamo:begin_tool_request:plamo|>",
        ("<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>"),
        _plamo_name,
    ),
    "NAME" + _PLAMO_NAME[1] + "json".join(("".join(_PLAMO_TYPE[:2]), _PLAMO_TYPE[2])),
    (*_PLAMO_NAME, *_PLAMO_TYPE),
    opening=_PLAMO_NAME[0],
)
