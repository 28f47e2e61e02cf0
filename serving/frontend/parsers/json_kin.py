"""Families whose calls are JSON objects behind marks of their own: Cohere, InternLM, Jamba, Hunyuan, LongCat, Nemotron, xLAM, Apertus,
GigaChat; and reasoning between marks of their own."""

from __future__ import annotations

import json
from dataclasses import replace

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import marked, parsed, read_value
from pagoda.serving.frontend.parsers.llama import bare
from pagoda.serving.frontend.parsers.thinking import thinking


def _family(names: tuple[str, ...], starts: tuple[str, ...], end: str, shapes: tuple[CallShape, ...] = ()) -> Family:
    return Family("tools", names, scripted(marked(starts, (end,))), signs=starts[:1], marks=(*starts, end), shapes=shapes)


def _shapes(start: str, end: str, listed: bool) -> tuple[CallShape, ...]:
    """One call between two marks, or a list of them."""
    if listed:
        around = {"before": f"{start}[", "between": ", ", "after": f"]{end}", "trigger": start, "marks": (start, end)}
        return (CallShape('{"name": "', 'NAME", "arguments": ', "}", **around),)
    return (CallShape(f'{start}{{"name": "', 'NAME", "arguments": ', f"}}{end}", between="\n", trigger=start, marks=(start, end)),)


_ACTIONS = {"before": "<|START_ACTION|>[\n    ", "between": ",\n    ", "after": "]<|END_ACTION|>", "trigger": "<|START_ACTION|>"}
_ACTION = CallShape(
    '{"tool_call_id": "0", "tool_name": "', 'NAME", "parameters": ', "}", marks=("<|START_ACTION|>", "<|END_ACTION|>"), **_ACTIONS
)
COHERE = _family(("cohere_command3", "cohere_command4"), ("<|START_ACTION|>",), "<|END_ACTION|>", (_ACTION,))
_PLUGIN, _PLUGIN_END = ("<|action_start|>", "<|plugin|>"), "<|action_end|>"
INTERNLM = _family(
    ("internlm",),
    (_PLUGIN[0], "".join(_PLUGIN), " ".join(_PLUGIN)),
    _PLUGIN_END,
    (
        CallShape(
            "".join(_PLUGIN) + '\n{"name": "', 'NAME", "parameters": ', "}" + _PLUGIN_END,
            between="\n", trigger=_PLUGIN[0], marks=(*_PLUGIN, _PLUGIN_END),
        ),
    ),
)  # fmt: skip
LONGCAT = _family(
    ("longcat",), ("<longcat_tool_call>",), "</longcat_tool_call>", _shapes("<longcat_tool_call>", "</longcat_tool_call>", False)
)
NEMOTRON = _family(("nemotron_nano",), ("<TOOLCALL>",), "</TOOLCALL>", _shapes("<TOOLCALL>", "</TOOLCALL>", True))
JAMBA = _family(("jamba", "hunyuan_a13b"), ("<tool_calls>",), "</tool_calls>", _shapes("<tool_calls>", "</tool_calls>", True))


_ROLE, _NEXT = "<|role_sep|>\n", "<|message_sep|>\n\n"
_GIGA = (f"{_NEXT}function call{_ROLE}", f"function call{_ROLE}", "<|function_call|>")


def _giga(before: str, between: str, needs: str) -> CallShape:
    marks = (_ROLE, _NEXT, _GIGA[2])
    return CallShape(f'{before}{{"name": "', 'NAME", "arguments": ', "}", between=between, trigger=before, marks=marks, needs=needs)


GIGACHAT = Family(
    "tools",
    ("gigachat3",),
    scripted(marked(_GIGA, (_NEXT, "</s>"))),
    signs=("<|role_sep|>", "<|function_call|>"),
    marks=(*_GIGA, _NEXT),
    shapes=(_giga(_GIGA[2], _NEXT, needs=_GIGA[2]), _giga(_GIGA[0], "", needs="")),
)


def _xlam(flow: Flow) -> Script[None]:
    yield from bare(flow)
    yield from marked(("[TOOL_CALLS]", "<tool_call>"), ("</tool_call>",))(flow)


XLAM = Family(
    "tools",
    ("xlam",),
    scripted(_xlam),
    marks=("<tool_call>", "</tool_call>"),
    shapes=(CallShape('{"name": "', 'NAME", "arguments": ', "}", before="[", between=", ", after="]"),),
)

PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


def _apertus(flow: Flow) -> Script[None]:
    """A list of objects with one key, the tool's name, each."""
    while (yield from flow.plain(Content, PREFIX)):
        yield from flow.skip_space()
        calls = parsed((yield from read_value(flow))) if (yield from flow.peek()) == "[" else None
        if not isinstance(calls, list) or not all(isinstance(call, dict) and len(call) == 1 and all(call) for call in calls):
            continue
        for call in calls:
            ((name, arguments),) = call.items()
            flow.call(name)
            flow.arguments(json.dumps(arguments or {}, ensure_ascii=False))
        flow.drop()
        yield from flow.skip_space()
        yield from flow.close(SUFFIX)


_KEYED = CallShape('{"', 'NAME": ', "}", f"{PREFIX}[", ", ", f"]{SUFFIX}", PREFIX, (PREFIX, SUFFIX))
APERTUS = Family("tools", ("apertus",), scripted(_apertus), signs=(PREFIX,), marks=(PREFIX, SUFFIX), shapes=(_KEYED,))


def _thinking(
    name: str, marks: tuple[str, str], *answers: tuple[str, str], until: tuple[str, ...] = (), silent: tuple[str, ...] = ()
) -> Family:
    script = scripted(thinking(marks[:1], marks[1:], answers, until, silent))
    signs = tuple(begin for begin, _ in answers) or marks[:1]
    every = (*marks, *(mark for pair in answers for mark in pair), *until, *silent)
    return Family("reasoning", (name,), script, signs=signs, marks=every, opens=marks[:1], closes=marks[1:])


_THOUGHTS, _RESPONSE, _TEXT = ((f"<|START_{what}|>", f"<|END_{what}|>") for what in ("THINKING", "RESPONSE", "TEXT"))
COHERE_REASONING = _thinking("cohere_command3", _THOUGHTS, _RESPONSE)
COHERE4_REASONING = replace(_thinking("cohere_command4", _THOUGHTS, _RESPONSE, _TEXT), signs=_TEXT[:1])
HUNYUAN_REASONING = _thinking("hunyuan_a13b", ("<think>", "</think>"), ("<answer>", "</answer>"))
ERNIE_REASONING = _thinking("ernie45", ("<think>", "</think>"), ("<response>", "</response>"))
SEED_REASONING = _thinking("seed_oss", ("<seed:think>", "</seed:think>"))
LONGCAT_REASONING = _thinking("longcat", ("<longcat_think>", "</longcat_think>"))
APERTUS_REASONING = _thinking("apertus", ("<|inner_prefix|>", "<|inner_suffix|>"))
MINIMAX3_REASONING = _thinking("minimax_m3", ("<mm:think>", "</mm:think>"), until=("]<]minimax[>[<tool_call>",))
PLAMO_REASONING = _thinking(
    "plamo3",
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    until=("<|plamo:begin_tool_requests:plamo|>",),
    silent=("<|plamo:tag|>",),
)
