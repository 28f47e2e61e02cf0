"""Calls as tags around each argument, `<function=NAME><parameter=KEY>value</parameter>…</function>`; values are text, typed by the tool."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted


@dataclass(frozen=True)
class Tags:
    """How one family spells them.

    starts: what may stand before a call. function: opens a call; its name follows, up to ">". parameter: likewise with the key,
    in which an attribute `string="true"` or "false" settles the type. ends: what may stand behind a call.
    """

    starts: tuple[str, ...]
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    ends: tuple[str, ...]


def tagged(tags: Tags) -> Callable[[Flow], Script[None]]:
    """The script of one family."""

    def script(flow: Flow) -> Script[None]:
        while mark := (yield from flow.plain(Content, *tags.starts, tags.function)):
            while mark in tags.starts:
                yield from flow.skip_space()
                mark = yield from flow.eat(*tags.starts, tags.function)
            name = (yield from flow.upto(">")) if mark else None
            if not name or not _plain_name(name):
                continue
            flow.call(_plain_name(name))
            flow.take(1)
            yield from _parameters(flow, tags, flow.context.tools.get(_plain_name(name), {}))
            yield from flow.skip_space()
            while (yield from flow.close(*tags.ends)):
                yield from flow.skip_space()

    return script


def _plain_name(header: str) -> str:
    return header.strip().partition('"')[0].strip()


def _parameters(flow: Flow, tags: Tags, schema: Any) -> Script[None]:
    between = "{"
    while True:
        yield from flow.skip_space()
        mark = yield from flow.eat(tags.parameter, tags.function_end)
        if mark != tags.parameter:
            if mark or flow.cut_in(tags.function_end, tags.parameter):
                flow.arguments("{}" if between == "{" else "}")
            return None if mark or not flow.ended else flow.cut()
        header = yield from flow.upto(">")
        flow.take(1)
        text = yield from flow.upto(tags.parameter_end)
        if header is None or text is None:
            return flow.cut()
        flow.take(len(tags.parameter_end))
        key = _plain_name(header)
        value = json.dumps(_value(text, header, schema, key), ensure_ascii=False)
        flow.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
        between = ", "


def _value(text: str, header: str, schema: Any, key: str) -> Any:
    if 'string="true"' in header:
        return text
    text = text.removeprefix("\n").removesuffix("\n")
    return from_text(text) if 'string="false"' in header else typed(text, schema, key)


def typed(text: str, schema: Any, key: str) -> Any:
    """An argument's value of the type that the tool's schema gives `key`; text where it gives none or the text is no such value."""
    kind = ((schema.get("properties") or {}).get(key) or {}).get("type", "string")
    return text if kind == "string" else from_text(text)


def from_text(text: str) -> Any:
    """The JSON value that a text spells, Python's True and None too; else the text."""
    for spelling in (text, text.strip().lower()):
        try:
            return json.loads("null" if spelling == "none" else spelling)
        except ValueError:
            continue
    return text


def _family(names: tuple[str, ...], tags: Tags, signs: tuple[str, ...], shapes: tuple[CallShape, ...] = ()) -> Family:
    return Family("tools", names, scripted(tagged(tags)), signs=signs, marks=(*tags.starts, *tags.ends), shapes=shapes)


def _shape(start: str, end: str) -> CallShape:
    """Of those that spell it as Qwen's coders do."""
    close = f"\n</function>\n{end}"
    marks = (start, end)
    return CallShape(f"{start}\n<function=", "NAME>\n", close, between="\n", trigger=start, marks=marks, bare_name=True, style="qwen_xml")


QWEN_CODER = _family(
    ("qwen3_coder", "qwen3_xml", "nemotron_v3", "step3p5"),
    Tags(("<tool_call>",), "<function=", "</function>", "<parameter=", "</parameter>", ("</tool_call>",)),
    ("<function=",),
    (_shape("<tool_call>", "</tool_call>"),),
)
SEED = _family(
    ("seed_oss",),
    Tags(("<seed:tool_call>",), "<function=", "</function>", "<parameter=", "</parameter>", ("</seed:tool_call>",)),
    ("<seed:tool_call>",),
    (_shape("<seed:tool_call>", "</seed:tool_call>"),),
)


def _listed(start: str, end: str, invoke: str, invoke_end: str, style: str) -> CallShape:
    """Calls in a row between two marks."""
    around = {"before": f"{start}\n", "after": end, "trigger": start, "marks": (start, end)}
    return CallShape(f'{invoke} name="', 'NAME">\n', f"{invoke_end}\n", bare_name=True, style=style, **around)


MINIMAX = _family(
    ("minimax_m2",),
    Tags(("<minimax:tool_call>",), '<invoke name="', "</invoke>", '<parameter name="', "</parameter>", ("</minimax:tool_call>",)),
    ("<minimax:tool_call>",),
    (_listed("<minimax:tool_call>", "</minimax:tool_call>", "<invoke", "</invoke>", "minimax_xml"),),
)
DSML = "｜DSML｜"
DEEPSEEK_V32 = _family(
    ("deepseek_v32",),
    Tags(
        (f"<{DSML}function_calls>",),
        f'<{DSML}invoke name="',
        f"</{DSML}invoke>",
        f'<{DSML}parameter name="',
        f"</{DSML}parameter>",
        (f"</{DSML}function_calls>",),
    ),
    (f"<{DSML}",),
    (_listed(f"<{DSML}function_calls>", f"</{DSML}function_calls>", f"<{DSML}invoke", f"</{DSML}invoke>", "deepseek_xml"),),
)
_CALLS, _CALLS_END, _CALL, _CALL_END = (f"<｜tool_{what}｜>" for what in ("calls_begin", "calls_end", "call_begin", "call_end"))
_SEPARATOR = "<｜tool_sep｜>"
_STEPS = CallShape(
    f'{_CALL}function{_SEPARATOR}<steptml:invoke name="',
    'NAME">\n',
    f"</steptml:invoke>{_CALL_END}",
    before=_CALLS,
    after=_CALLS_END,
    trigger=_CALLS,
    marks=(_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR),
    bare_name=True,
    style="step3",
)
STEP3 = _family(
    ("step3",),
    Tags(
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>function<｜tool_sep｜>"),
        '<steptml:invoke name="',
        "</steptml:invoke>",
        '<steptml:parameter name="',
        "</steptml:parameter>",
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    ),
    ("<steptml:",),
    (_STEPS,),
)
