"""`hf`: answers read as the checkpoint says itself, by the `response_template` of its tokenizer: fields between marks, each with a form.

The template's words are those of transformers' chat parsing: a field has `open` and `close` (texts) or `open_pattern` and `close_pattern`
(expressions), `content` (text, json, xml-inline, kv-lines) with `content_args`, and `transform`; one without an opening is what stands
outside of the others. Read here are the fields `content`, `thinking` and `tool_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pagoda.hal.errors import ConfigError
from pagoda.serving.frontend.parsers.events import Content, Context, Family, Hints, Kind, Parser, Reasoning
from pagoda.serving.frontend.parsers.flow import Flow, Script, ScriptParser
from pagoda.serving.frontend.parsers.tagged import typed

FIELDS = ("content", "thinking", "tool_calls")
MOST = 256
"""Characters that an expression may take behind its first ones."""

_HOLE = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class Edge:
    """Where a field begins or ends: one of `heads`, or an expression whose matches all begin with the only one."""

    heads: tuple[str, ...]
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Field:
    """See the template's words above; `each`: the transform is of the members of a list."""

    name: str
    opens: Edge | None
    closes: Edge | None
    content: str
    args: Mapping[str, Any]
    transform: Any
    each: bool

    @property
    def strips(self) -> bool:
        return bool(self.args.get("strip", True))


@dataclass(frozen=True)
class Template:
    """anchor: what an assistant's turn begins behind."""

    fields: Mapping[str, Field]
    anchor: re.Pattern[str]

    @property
    def outside(self) -> Field | None:
        """The field of what stands in no other."""
        return next((field for field in self.fields.values() if field.opens is None), None)

    def marks(self) -> tuple[str, ...]:
        edges = [edge for field in self.fields.values() for edge in (field.opens, field.closes) if edge is not None]
        return tuple(head for edge in edges for head in edge.heads)


def read_template(given: Mapping[str, Any]) -> Template:
    """Raises `ConfigError` for one that cannot be followed."""
    fields = given.get("fields")
    if not isinstance(fields, Mapping) or not fields or not set(fields) <= set(FIELDS):
        raise _refused(f"it must have fields of {', '.join(FIELDS)}; found {', '.join(map(str, fields or ())) or 'none'}")
    read = {name: _field(name, field) for name, field in fields.items()}
    if sum(field.opens is None for field in read.values()) > 1:
        raise _refused("at most one field may have no opening")
    anchor = given.get("start_anchor_pattern")
    texts = _texts(given.get("start_anchor", ()))
    return Template(read, _compiled(anchor if isinstance(anchor, str) else "|".join(map(re.escape, texts)) or "$.", "start_anchor"))


def _field(name: str, given: Any) -> Field:
    content = given.get("content", "text")
    if content not in _CONTENTS:
        raise _refused(f"the field {name} has content {content!r}; there is {', '.join(_CONTENTS)}")
    opens, closes = (_edge(name, given, side) for side in ("open", "close"))
    return Field(name, opens, closes, content, given.get("content_args", {}), given.get("transform"), bool(given.get("transform_each")))


def _edge(name: str, given: Mapping[str, Any], side: str) -> Edge | None:
    if (pattern := given.get(f"{side}_pattern")) is not None:
        head = _head(pattern)
        if not head:
            raise _refused(f"{side}_pattern of {name} must begin with characters that stand for themselves; found {pattern!r}")
        return Edge((head,), _compiled(pattern, f"{side}_pattern"))
    texts = _texts(given.get(side, ()))
    return Edge(texts) if texts else None


def _texts(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _compiled(pattern: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise _refused(f"{what} is no expression: {error}") from error


def _head(pattern: str) -> str:
    """The characters that each match begins with, as far as they stand for themselves; none where it has branches."""
    head, at, depth = "", 0, 0
    for place, char in enumerate(pattern):
        depth += (char in "([") - (char in ")]") if pattern[place - 1 : place] != "\\" else 0
        if char == "|" and depth == 0 and pattern[place - 1 : place] != "\\":
            return ""
    while at < len(pattern):
        char, size = pattern[at], 1
        if char == "\\":
            char, size = pattern[at + 1], 2
            if char.isalnum():
                if char not in _PLAIN_ESCAPES:
                    break
                char = _PLAIN_ESCAPES[char]
        elif char in ".^$*+?{}[]()|":
            break
        at += size
        if pattern[at : at + 1] in ("*", "?", "{"):
            break
        head += char
    return head


def _refused(why: str) -> ConfigError:
    return ConfigError(f"the checkpoint's response_template cannot be followed: {why}; name a parser, or none")


class Found(NamedTuple):
    """What an edge belongs to, and what its expression names."""

    field: Field | None
    named: Mapping[str, str]


def _until(flow: Flow, kind: Kind | None, watched: Sequence[tuple[Edge | None, Field | None]]) -> Script[Found | None]:
    """Say what is of this kind up to the first edge, which is held; None at the end of the answer."""
    edges = [(edge, field) for edge, field in watched if edge is not None]
    while mark := (yield from flow.plain(kind, *(head for edge, _ in edges for head in edge.heads))):
        for edge, field in edges:
            found = (yield from _match(flow, edge, mark)) if mark in edge.heads else None
            if found is not None:
                return Found(field, found)
        flow.release(kind)
    return None


def _match(flow: Flow, edge: Edge, mark: str) -> Script[Mapping[str, str] | None]:
    """Read the rest of an edge whose head is read, the shortest that more text would not change; what its expression names."""
    if edge.pattern is None:
        return {}
    size = 0
    while True:
        while size <= min(len(flow.text), MOST):
            found = edge.pattern.match(mark + flow.text[:size])
            if found and found.end() < len(mark) + size:
                return _taken(flow, mark, found)
            size += 1
        if len(flow.text) >= MOST or not (yield from flow.more()):
            break
    found = edge.pattern.match(mark + flow.text[:MOST])
    return _taken(flow, mark, found) if found else None


def _taken(flow: Flow, mark: str, found: re.Match[str]) -> Mapping[str, str]:
    flow.take(found.end() - len(mark))
    return {key: value for key, value in found.groupdict().items() if value is not None}


def _reasoning(template: Template) -> Callable[[Flow], Script[None]]:
    """Thoughts, and what is for the reader; calls go on as they stand to whoever reads calls."""
    outside = template.outside
    kind: Kind | None = None if outside is None else Reasoning if outside.name == "thinking" else Content
    watched = [(field.opens, field) for field in template.fields.values()]
    watched += [(outside.closes if outside is not None else None, None)]  # type: ignore[list-item]

    def script(flow: Flow) -> Script[None]:
        if outside is not None and outside.strips:
            yield from flow.skip_space()
        while found := (yield from _until(flow, kind, watched)):
            field = found.field
            if field is not None and field.name == "tool_calls":
                flow.release()
                yield from _until(flow, Content, [(field.closes, None)])
                flow.release()
                continue
            flow.drop()
            if field is not None:
                if field.strips:
                    yield from flow.skip_space()
                yield from _until(flow, Reasoning if field.name == "thinking" else Content, [(field.closes, None)])
                flow.drop()
                if outside is not None and outside.strips:
                    yield from flow.skip_space()

    return script


def _calls(template: Template) -> Callable[[Flow], Script[None]]:
    field = template.fields["tool_calls"]

    def script(flow: Flow) -> Script[None]:
        while found := (yield from _until(flow, Content, [(field.opens, field)])):
            body = yield from _body(flow, field.closes)
            calls = _told(field, body, found.named, flow.context.tools)
            if calls is None:
                continue
            for name, arguments in calls:
                flow.call(name)
                flow.arguments(arguments)
            if flow.ended:
                flow.cut()

    return script


def _body(flow: Flow, end: Edge | None) -> Script[str]:
    """A field's text up to its end, which is read, or to the end of the answer."""
    body = ""
    while end is not None and (piece := (yield from flow.upto(*end.heads))) is not None:
        mark = yield from flow.eat(*end.heads)
        if (yield from _match(flow, end, mark)) is not None:
            return body + piece
        body += piece + mark
    while (yield from flow.more()):
        pass
    rest = flow.text if end is None else flow.before_cut(*end.heads)
    return body + (flow.text if rest is None else rest)


def _told(field: Field, body: str, named: Mapping[str, str], tools: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Names and arguments; None where the text is no call."""
    try:
        value = _CONTENTS[field.content](body, field.args)
        if field.transform is not None:
            scopes = [{**named, **item} for item in value] if field.each else [{**named, "content": value}]
            value = [_filled(field.transform, scope) for scope in scopes]
        calls = [_call(call.get("function", call), tools) for call in (value if isinstance(value, list) else [value])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return calls or None


def _call(call: Mapping[str, Any], tools: Mapping[str, Any]) -> tuple[str, str]:
    name, arguments = call["name"], call.get("arguments")
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(name)
    schema = tools.get(name) or {}
    given = {key: typed(value, schema, key) if isinstance(value, str) else value for key, value in arguments.items()}
    return name, json.dumps(given, ensure_ascii=False)


def _filled(form: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(form, dict):
        return {key: _filled(value, scope) for key, value in form.items()}
    if isinstance(form, list):
        return [_filled(value, scope) for value in form]
    hole = _HOLE.fullmatch(form) if isinstance(form, str) else None
    if hole is None:
        return form
    value: Any = scope
    for key in hole.group(1).split("."):
        value = value[key]
    return value


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Mapping[str, Any]) -> Any:
    """JSON, whose texts may stand between other marks, and whose keys may lack quotes."""
    ends: dict[str, str] = dict(args.get("string_delims", ()))
    parts = [f"{re.escape(begin)}.*?{re.escape(end)}" for begin, end in ends.items()]
    parts += [r'"(?:[^"\\]|\\.)*"', *([r"(?<=[{,])\s*\w+(?=\s*:)"] if args.get("unquoted_keys") else [])]

    def written(found: re.Match[str]) -> str:
        whole = found.group()
        for begin, end in ends.items():
            if whole.startswith(begin):
                return json.dumps(whole[len(begin) : -len(end)])
        return whole if whole.startswith('"') else json.dumps(whole.strip())

    try:
        return json.loads(re.sub("|".join(parts), written, text, flags=re.DOTALL))
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Tags, each with a key and a value by the expression `tag_pattern`."""
    out: dict[str, Any] = {}
    for found in re.finditer(args["tag_pattern"], text, re.DOTALL):
        key, value = found.group("key"), _part(found.groupdict().get("value") or "", args.get("value_parser"))
        if key in out and args.get("merge_duplicates"):
            out[key] = [*(out[key] if isinstance(out[key], list) else [out[key]]), value]
        else:
            out[key] = value
    return out


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    pairs = [line.partition(args.get("kv_sep", ":")) for line in text.split(args.get("line_sep", "\n"))]
    return {_text(key, args): _part(_text(value, args), args.get("value_parser")) for key, there, value in pairs if there}


def _part(text: str, given: Mapping[str, Any] | None) -> Any:
    return text if given is None else _CONTENTS[given.get("name", "text")](text, given.get("args", {}))


_CONTENTS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "json": _json,
    "xml-inline": _inline,
    "kv-lines": _lines,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
}


def _thoughts(hints: Hints) -> Family:
    template = _given(hints, "thinking", "--reasoning-parser")
    thinking = template.fields["thinking"]
    opens, closes = (edge.heads if edge is not None and edge.pattern is None else () for edge in (thinking.opens, thinking.closes))

    def make(context: Context) -> Parser:
        parser = ScriptParser(_reasoning(template), context)
        if begun := [found.end() for found in template.anchor.finditer(context.prompt_end)]:
            parser.feed(context.prompt_end[begun[-1] :])  # what the prompt has written of the answer
        return parser

    return Family("reasoning", NAMES, make, marks=template.marks(), opens=opens, closes=closes)


def _callers(hints: Hints) -> Family:
    template = _given(hints, "tool_calls", "--tool-call-parser")
    script = _calls(template)
    return Family("tools", NAMES, lambda context: ScriptParser(script, context), marks=template.marks())


def _given(hints: Hints, field: str, flag: str) -> Template:
    if hints.response is None:
        raise ConfigError(f"{flag} hf needs a response_template in the checkpoint's tokenizer_config.json; there is none")
    template = read_template(hints.response)
    if field not in template.fields or (field == "tool_calls" and template.fields[field].opens is None):
        raise ConfigError(f"{flag} hf needs a response_template with {field}, which the checkpoint's has not; name another, or none")
    return template


def _nothing(flow: Flow) -> Script[None]:
    yield from flow.plain(Content)


NAMES = ("hf", "response_template")
HF = Family("tools", NAMES, lambda context: ScriptParser(_nothing, context), fitted=_callers)
HF_THOUGHTS = Family("reasoning", NAMES, lambda context: ScriptParser(_nothing, context), fitted=_thoughts)
