"""Structural tags (xgrammar's form): read and checked here, and written as Lark for llguidance where that can be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.structured.guidance_backend import with_options
from pagoda.serving.frontend.structured.schema import beyond_xgrammar, check_depth, prepared

Format = dict[str, Any]

_INNER = ("content", "format")
_INNERS = ("elements", "tags")
TEXT = r"/(.|\n)*/"


def read_tag(source: str, origin: str) -> Format:
    """A structural tag from its text; the older form, `structures` with `triggers`, becomes the newer. Raises `RequestError`."""
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the structural tag is no JSON: {error}", param=origin) from error
    check_depth(tag, origin)
    if isinstance(tag, dict) and isinstance(tag.get("structures"), list) and isinstance(tag.get("triggers"), list):
        return {"type": "structural_tag", "format": _of_structures(tag, origin)}
    if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
        raise RequestError("a structural tag is an object with `format`, or with `structures` and `triggers`", param=origin)
    return {"type": "structural_tag", "format": tag["format"]}


def _of_structures(tag: Format, origin: str) -> Format:
    tags = []
    for one in tag["structures"]:
        if not isinstance(one, dict) or not isinstance(one.get("begin"), str) or not isinstance(one.get("end"), str):
            raise RequestError("each of a structural tag's structures has begin, schema and end", param=origin)
        schema = one.get("schema") or {"type": "object"}
        tags.append({"type": "tag", "begin": one["begin"], "content": {"type": "json_schema", "json_schema": schema}, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def formats(value: Any) -> Iterator[Format]:
    """A format and all that stand in it."""
    if not isinstance(value, dict):
        return
    yield value
    for name in _INNER:
        yield from formats(value.get(name))
    for name in _INNERS:
        if isinstance(value.get(name), list):
            for inner in value[name]:
                yield from formats(inner)
    for rule in value.get("rules") or () if value.get("type") == "dispatch" else ():
        yield from formats(rule[1])


def tag_with_schemas(tag: Format, closed: bool | None) -> Format:
    """A copy whose schemas are `prepared`."""
    tag = json.loads(json.dumps(tag))
    for part in formats(tag):
        if part.get("type") == "json_schema" and isinstance(part.get("json_schema"), dict | bool):
            part["json_schema"] = prepared(part["json_schema"], closed)
    return tag


def tag_beyond_xgrammar(tag: Format) -> str | None:
    """The first feature of its schemas that xgrammar does not keep to."""
    schemas = [part["json_schema"] for part in formats(tag) if part.get("type") == "json_schema" and "json_schema" in part]
    return next((lack for schema in schemas if (lack := beyond_xgrammar(schema)) is not None), None)


def tag_beyond_guidance(tag: Format) -> str | None:
    """The first of its formats that has no Lark here."""
    for part in formats(tag["format"]):
        kind = part.get("type")
        if kind not in _WRITERS:
            return f"the format {kind!r}"
        for name, plain in (("style", "json"), ("excludes", []), ("any_order", False), ("max_tokens", None), ("max_chars", None)):
            if part.get(name, plain) != plain:
                return f"{name} of the format {kind!r}"
    return None


def tag_lark(tag: Format, blanks: bool) -> str:
    """A grammar in Lark."""
    writer = _Writer(blanks)
    return "\n".join([f"start: {writer.write(tag['format'])}", *writer.rules, f"TEXT: {TEXT}", ""])


class _Writer:
    def __init__(self, blanks: bool) -> None:
        self.blanks = blanks
        self.rules: list[str] = []

    def write(self, part: Format) -> str:
        return _WRITERS[part["type"]](self, part)

    def rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _literal(text: str | Format) -> str:
    if isinstance(text, dict):
        token = text["token"]
        return f"<[{token}]>" if isinstance(token, int) else str(token)
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _ends(end: Any) -> str:
    return " | ".join(_literal(one) for one in end) if isinstance(end, list) else _literal(end)


def _tag(writer: _Writer, part: Format, begin: str | None = None) -> str:
    before = _literal(part["begin"]) if begin is None else begin
    if part["content"].get("type") == "any_text":
        return writer.rule(f"{before} {_until(writer, part['end'])}")
    return writer.rule(f"{before} {writer.write(part['content'])} ({_ends(part['end'])})")


def _until(writer: _Writer, end: Any) -> str:
    """Any text up to its first end, the end included."""
    if isinstance(end, dict):
        return f"TEXT {_literal(end)}"
    return writer.rule(f"TEXT ({_ends(end)})", "[lazy]") if end else "TEXT"


def _triggered(writer: _Writer, part: Format) -> str:
    triggers, tags = part.get("triggers") or part.get("trigger_tokens") or [], []
    for tag in part["tags"]:
        begin = tag["begin"]
        if isinstance(begin, dict):
            head = _literal(begin)
            tags.append(_tag(writer, tag, head) if part.get("at_least_one") else writer.rule(f"TEXT {_tag(writer, tag, head)}"))
            continue
        trigger = next((one for one in triggers if begin.startswith(one)), begin)
        rest = _literal(begin[len(trigger) :])
        tags.append(_tag(writer, tag, f"{writer.rule(f'TEXT {_literal(trigger)}', '[lazy]')} {rest}"))
    one = writer.rule(" | ".join(tags))
    if part.get("at_least_one"):
        first = writer.rule(" | ".join(_tag(writer, tag) for tag in part["tags"]))
        return first if part.get("stop_after_first") else writer.rule(f"{first} {one}* TEXT")
    return writer.rule(f"TEXT | {one}" if part.get("stop_after_first") else f"{one}* TEXT")


def _separated(writer: _Writer, part: Format) -> str:
    one = writer.rule(" | ".join(_tag(writer, tag) for tag in part["tags"]))
    many = one if part.get("stop_after_first") else writer.rule(f"{one} ({_literal(part['separator'])} {one})*")
    return many if part.get("at_least_one") else f"{many}?"


def _schema(writer: _Writer, part: Format) -> str:
    return writer.rule("%json " + json.dumps(with_options(part["json_schema"], writer.blanks, None)))


def _regex(writer: _Writer, part: Format) -> str:
    return writer.rule("/" + part["pattern"].replace("\\/", "/").replace("/", "\\/") + "/")


_WRITERS: dict[str, Callable[[_Writer, Format], str]] = {
    "const_string": lambda writer, part: _literal(part["value"]),
    "token": lambda writer, part: _literal(part),
    "json_schema": _schema,
    "regex": _regex,
    "any_text": lambda writer, part: "TEXT",
    "sequence": lambda writer, part: writer.rule(" ".join(writer.write(one) for one in part["elements"])),
    "or": lambda writer, part: writer.rule(" | ".join(writer.write(one) for one in part["elements"])),
    "tag": _tag,
    "triggered_tags": _triggered,
    "token_triggered_tags": _triggered,
    "tags_with_separator": _separated,
    "optional": lambda writer, part: f"({writer.write(part['content'])})?",
    "star": lambda writer, part: f"({writer.write(part['content'])})*",
    "plus": lambda writer, part: f"({writer.write(part['content'])})+",
}
"""Formats with a form in Lark."""
