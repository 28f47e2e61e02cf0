"""Calls as tags around each argument, `<function=NAME><parameter=KEY>value</parameter>…</function>`; values are text, typed by the tool."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pagoda.serving.frontend.parsers.events import CallShape, Content, Family
from pagoda.serving.frontend.parsers.flow import Flow, Script, scripted
from pagoda.serving.frontend.parsers.json_calls import read_arguments, read_calls

_TYPE = re.compile(r'\b(?:string|type)="(\w*)"')
_QUOTE = re.compile("[\"']")


@dataclass(frozen=True)
class Tags:
    """How one family spells them.

    Attributes:
        starts: what may stand before a call. ends: what may stand behind one.
        functions: any opens a call; its name follows, up to `tag_end`. function_end: ends it.
        parameters: likewise with the key, in which an attribute `string="true"` or "false", or `type="…"`, settles the type.
        gates: where given, only behind one of these a call may begin.
        trim: what is no part of a value: a line break at each end, all space there, or nothing.
        literal: marks that may stand around a value inside its parameter. skipped: marks around a call's parameters that say nothing.
        whole: marks around all arguments as one object. as_json: behind a start, calls may be objects instead.
        free: arguments that the tool does not list are JSON where they can be, not text.
    """

    starts: tuple[str, ...]
    functions: tuple[str, ...]
    function_end: str
    parameters: tuple[str, ...]
    parameter_end: str
    ends: tuple[str, ...]
    tag_end: str = ">"
    gates: tuple[str, ...] = ()
    trim: Literal["line", "space", ""] = "line"
    literal: tuple[str, str] | None = None
    skipped: tuple[str, ...] = ()
    whole: tuple[str, str] | None = None
    as_json: bool = False
    free: bool = False


def tagged(tags: Tags) -> Callable[[Flow], Script[None]]:
    """The script of one family."""

    def script(flow: Flow) -> Script[None]:
        while mark := (yield from flow.plain(Content, *(tags.gates or (*tags.starts, *tags.functions)))):
            while mark in tags.starts or mark in tags.gates:
                yield from flow.skip_space()
                mark = yield from flow.eat(*tags.starts, *tags.functions)
            if not mark and tags.as_json and (yield from flow.peek()) in ("{", "["):
                yield from _as_json(flow, tags)
            while mark and (yield from _call(flow, tags)):
                flow.hold()
                mark = yield from flow.eat(*tags.functions)

    return script


def _as_json(flow: Flow, tags: Tags) -> Script[None]:
    before = flow.calls
    yield from read_calls(flow)
    if flow.calls > before:
        yield from _ends(flow, tags)


def _call(flow: Flow, tags: Tags) -> Script[bool]:
    name = _offered(plain_name((yield from flow.upto(tags.tag_end)) or ""), flow)
    if not name:
        return False
    flow.call(name)
    flow.take(len(tags.tag_end))
    yield from _parameters(flow, tags, flow.context.tools.get(name, {}))
    yield from _ends(flow, tags)
    return True


def _ends(flow: Flow, tags: Tags) -> Script[None]:
    yield from flow.skip_space()
    while (yield from flow.close(*tags.ends)):
        yield from flow.skip_space()


def _offered(name: str, flow: Flow) -> str:
    """Muse writes `NAME.NAME` for a tool that has no namespace."""
    head, _, tail = name.partition(".")
    return head if head == tail and name not in flow.context.tools and head in flow.context.tools else name


def plain_name(header: str) -> str:
    """Out of the rest of a tag, `NAME" other="…"`."""
    return _QUOTE.split(header.strip())[0].strip().replace("&quot;", '"').replace("&amp;", "&")


def _parameters(flow: Flow, tags: Tags, schema: Any) -> Script[None]:
    between = "{"
    while True:
        yield from flow.skip_space()
        mark = yield from flow.eat(*tags.parameters, *tags.skipped, *(tags.whole or ())[:1], tags.function_end)
        if mark and mark in tags.skipped:
            continue
        if tags.whole and mark == tags.whole[0]:
            yield from read_arguments(flow, flow.arguments)
            yield from flow.skip_space()
            yield from flow.close(tags.whole[1])
            yield from flow.skip_space()
            yield from flow.close(tags.function_end)
            return
        if mark not in tags.parameters:
            if mark or flow.cut_in(tags.function_end, tags.parameters[0]):
                flow.arguments("{}" if between == "{" else "}")
            return None if mark or not flow.ended else flow.cut()
        header = yield from flow.upto(tags.tag_end)
        flow.take(len(tags.tag_end))
        text, trim = yield from _text(flow, tags)
        if header is None or text is None:
            return flow.cut()
        key = plain_name(header)
        value = json.dumps(_value(_trimmed(text, trim), header, schema, key, tags), ensure_ascii=False)
        flow.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {value}")
        between = ", "


def _text(flow: Flow, tags: Tags) -> Script[tuple[str | None, str]]:
    """A parameter's text, and what may be trimmed of it."""
    if tags.literal:
        yield from flow.skip_space()
    literal = bool(tags.literal) and bool((yield from flow.eat(*(tags.literal or ())[:1])))
    if literal and tags.literal:
        text = yield from flow.upto(tags.literal[1])
        yield from flow.upto(tags.parameter_end)
    else:
        text = yield from flow.upto(tags.parameter_end)
    flow.take(len(tags.parameter_end))
    return text, "" if literal else tags.trim


def _trimmed(text: str, trim: str) -> str:
    if trim == "space":
        return text.strip()
    return text.removeprefix("\n").removesuffix("\n") if trim else text


def _value(text: str, header: str, schema: Any, key: str, tags: Tags) -> Any:
    declared = _TYPE.search(header)
    if declared:
        return text if declared.group(1) in ("true", "string") else from_text(text)
    return typed(text, schema, key, "any" if tags.free else "string")


def typed(text: str, schema: Any, key: str, default: str = "string") -> Any:
    """An argument's value of a type that the tool's schema gives `key`, or `default`; text where the text is no such value."""
    given = (schema.get("properties") or {}).get(key)
    return valued(text, types_of(given, schema, (default,)))


def valued(text: str, types: set[str]) -> Any:
    """The value of one of these types that a text spells, the text where it can be none other; "any" is whatever it spells."""
    value = from_text(text)
    if "string" not in types:
        return value
    return value if types & _names(value) - {"string"} else text


def types_of(given: Any, root: Any, default: tuple[str, ...] = ("string",)) -> set[str]:
    """The JSON types that a schema allows at its top; `root`: where its references point. What says nothing is of the default's."""
    given = resolved(given, root)
    if not isinstance(given, dict) or not given:
        return set(default)
    if "type" in given:
        return {str(kind) for kind in (given["type"] if isinstance(given["type"], list) else [given["type"]])}
    choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in given.get(word) or ()]
    if choices:
        return {kind for choice in choices for kind in types_of(choice, root, default)}
    values = given["enum"] if "enum" in given else [given["const"]] if "const" in given else []
    return {kind for value in values for kind in _names(value)} or set(default)


def resolved(given: Any, root: Any) -> Any:
    """A schema, or what its reference into `root` names."""
    for _ in range(_MOST_HOPS):
        if not isinstance(given, dict) or not isinstance(given.get("$ref"), str):
            break
        name = given["$ref"].rpartition("/")[2]
        given = (root.get("$defs") or {}).get(name) or (root.get("definitions") or {}).get(name)
    return given


_MOST_HOPS = 8


def _names(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    return {{type(None): "null", str: "string", list: "array", dict: "object"}[type(value)]}


def from_text(text: str) -> Any:
    """The JSON value that a text spells, Python's True and None too; else the text."""
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text


_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _no_number(name: str) -> Any:
    raise ValueError(name)


def _family(names: tuple[str, ...], tags: Tags, signs: tuple[str, ...], shapes: tuple[CallShape, ...] = ()) -> Family:
    return Family("tools", names, scripted(tagged(tags)), signs=signs, marks=(*tags.gates, *tags.starts, *tags.ends), shapes=shapes)


def _shape(start: str, end: str) -> CallShape:
    """Of those that spell it as Qwen's coders do."""
    close = f"\n</function>\n{end}"
    marks = (start, end)
    return CallShape(f"{start}\n<function=", "NAME>\n", close, between="\n", trigger=start, marks=marks, bare_name=True, style="qwen_xml")


def _functions(start: str, end: str, **how: Any) -> Tags:
    return Tags((start,), ("<function=",), "</function>", ("<parameter=",), "</parameter>", (end,), **how)


QWEN_CODER = _family(
    ("qwen3_coder", "qwen3_xml", "nemotron_v3", "step3p5"),
    _functions("<tool_call>", "</tool_call>"),
    ("<function=",),
    (_shape("<tool_call>", "</tool_call>"),),
)
MIMO = _family(("mimo",), _functions("<tool_call>", "</tool_call>", trim="", as_json=True), (), (_shape("<tool_call>", "</tool_call>"),))
SEED = _family(
    ("seed_oss",),
    _functions("<seed:tool_call>", "</seed:tool_call>"),
    ("<seed:tool_call>",),
    (_shape("<seed:tool_call>", "</seed:tool_call>"),),
)


def _listed(start: str, end: str, invoke: str, invoke_end: str, style: str) -> CallShape:
    """Calls in a row between two marks."""
    around = {"before": f"{start}\n", "after": end, "trigger": start, "marks": (start, end)}
    return CallShape(f'{invoke} name="', 'NAME">\n', f"{invoke_end}\n", bare_name=True, style=style, **around)


def _invokes(start: str, end: str, prefix: str = "", **how: Any) -> Tags:
    """`<invoke name="…"><parameter name="…">`, with a prefix in each tag."""
    return Tags(
        (start,),
        (f'<{prefix}invoke name="',),
        f"</{prefix}invoke>",
        (f'<{prefix}parameter name="',),
        f"</{prefix}parameter>",
        (end,),
        **how,
    )


MINIMAX = _family(
    ("minimax_m2",),
    _invokes("<minimax:tool_call>", "</minimax:tool_call>"),
    ("<minimax:tool_call>",),
    (_listed("<minimax:tool_call>", "</minimax:tool_call>", "<invoke", "</invoke>", "minimax_xml"),),
)
DOTS = _family(
    ("dots",),
    _invokes("<dots_function_call>", "</dots_function_call>", as_json=True),
    ("<dots_function_call>",),
    (_listed("<dots_function_call>", "</dots_function_call>", "<invoke", "</invoke>", "minimax_xml"),),
)
DSML = "｜DSML｜"


def _dsml(names: tuple[str, ...], prefix: str, section: str, sign: str, style: str) -> Family:
    start, end = f"<{prefix}{section}>", f"</{prefix}{section}>"
    shape = _listed(start, end, f"<{prefix}invoke", f"</{prefix}invoke>", style)
    return _family(names, _invokes(start, end, prefix, trim=""), (sign,), (shape,))


DEEPSEEK_V32 = _dsml(("deepseek_v32",), DSML, "function_calls", f"<{DSML}", "deepseek_xml")
DEEPSEEK_V4 = _dsml(("deepseek_v4",), DSML, "tool_calls", f"<{DSML}tool_calls", "deepseek_xml")
DEEPSEEK_V41 = _dsml(("deepseek_v41",), f"{DSML} ", "calls", f"<{DSML} ", "deepseek_v4_1_xml")

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
        ('<steptml:invoke name="',),
        "</steptml:invoke>",
        ('<steptml:parameter name="',),
        "</steptml:parameter>",
        ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    ),
    ("<steptml:",),
    (_STEPS,),
)


def _opened(tag: str, quote: str, space: str = " ") -> str:
    return f"<{tag}{space}name={quote}"


MINICPM5 = Family(
    "tools",
    ("minicpm5",),
    scripted(
        tagged(
            Tags(
                (),
                tuple(_opened("function", quote, space) for quote in "\"'" for space in (" ", "")),
                "</function>",
                tuple(_opened("param", quote, space) for quote in "\"'" for space in (" ", "")),
                "</param>",
                (),
                trim="space",
                literal=("<![CDATA[", "]]>"),
                skipped=("<arguments>", "</arguments>"),
            )
        )
    ),
    signs=("<param name=",),
    marks=('<function name="', "</function>", '<param name="', "</param>"),
    shapes=(
        CallShape(
            '<function name="',
            'NAME">',
            "</function>",
            between="\n",
            trigger='<function name="',
            marks=("<function", "</function>", "<param", "</param>"),
            bare_name=True,
            style="minicpm5",
        ),
    ),
)
