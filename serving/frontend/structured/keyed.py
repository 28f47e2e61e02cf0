"""Arguments that are written key by key in a form that the grammar libraries have no word for, as structural tags: a style a family.

An object's keys come in the order of its schema, those that it needs and any of the others. Where a value can be JSON text, the libraries'
own schemas say what it may be; texts are JSON, between marks (`quote`), or end with a mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.frontend.parsers.events import CallShape

Format = dict[str, Any]


class Style(NamedTuple):
    """before, middle, after: around a key and a value; SUFFIX in them stands for the shape's. between: pairs of them."""

    before: str
    middle: str
    after: str
    between: str


STYLES = {
    "python": Style("", "=", "", ", "),
    "gemma": Style("", ":", "", ","),
    "step3": Style('<steptml:parameter name="', '">', "</steptml:parameter>\n", ""),
    "atem": Style('<atem:parameter name="', '">', "</atem:parameter>\n", ""),
    "minicpm5": Style('<param name="', '">', "</param>", ""),
    "pairs": Style("<arg_keySUFFIX>", "</arg_keySUFFIX><arg_valueSUFFIX>", "</arg_valueSUFFIX>", ""),
    "pair_lines": Style("<arg_keySUFFIX>", "</arg_keySUFFIX>\n<arg_valueSUFFIX>", "</arg_valueSUFFIX>\n", ""),
    "ifm_pairs": Style("<ifm|arg_key>", "</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>", ""),
}
ANY_KEY = r"[A-Za-z_][A-Za-z0-9_]*"
_SHARED = ("$defs", "definitions")


class Keyed:
    """Writes one shape's arguments. `pieces`: a text with marks in it as formats; `param`: the request's field, for errors."""

    def __init__(self, shape: CallShape, pieces: Callable[[str], list[Format]], param: str) -> None:
        self._style = Style(*(part.replace("SUFFIX", shape.suffix) for part in STYLES[shape.style]))
        self._name, self._quote = shape.style, shape.quote
        self._pieces, self._param = pieces, param

    def arguments(self, schema: Mapping[str, Any]) -> Format:
        """What stands between the brackets of a call. Raises `RequestError` for a schema that has no such form."""
        shared = {name: schema[name] for name in _SHARED if name in schema}
        return self._object(schema, shared)

    def _object(self, schema: Mapping[str, Any], shared: Mapping[str, Any]) -> Format:
        given = schema.get("properties")
        if given is None:
            return self._any_object(schema)
        needed = set(schema.get("required", ()))
        if not needed <= set(given) or any(name in schema for name in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")):
            raise self._refused("an object that is more than properties")
        pairs = [(self._pair(key, value, shared), key in needed) for key, value in given.items()]
        return self._in_order(pairs)

    def _in_order(self, pairs: list[tuple[Format, bool]]) -> Format:
        """Each pair that is needed and any of the others, in this order; the first that is there has nothing before it."""
        between = [text(self._style.between)] if self._style.between else []
        later = [in_a_row([*between, pair]) for pair, _ in pairs]
        rest = [each if needed else {"type": "optional", "content": each} for each, (_, needed) in zip(later, pairs, strict=True)]
        first_needed = next((place for place, (_, needed) in enumerate(pairs) if needed), None)
        begins = range(len(pairs) if first_needed is None else first_needed + 1)
        choices = [in_a_row([pairs[place][0], *rest[place + 1 :]]) for place in begins]
        if first_needed is not None:
            return any_of(choices)
        return {"type": "optional", "content": any_of(choices)} if choices else text("")

    def _any_object(self, schema: Mapping[str, Any]) -> Format:
        if set(schema) - {"type", "additionalProperties", "description", "title", *_SHARED}:
            raise self._refused("an object without properties but with " + ", ".join(sorted(set(schema) - {"type"})))
        if schema.get("additionalProperties") is False:
            return text("")
        value = self._string({}) if self._name != "python" else {"type": "json_schema", "json_schema": {}}
        key: Format = {"type": "regex", "pattern": ANY_KEY}
        style = self._style
        pair = in_a_row([*self._pieces(style.before), key, *self._pieces(style.middle), value, *self._pieces(style.after)])
        more = in_a_row([*self._pieces(style.between), pair])
        return {"type": "optional", "content": in_a_row([pair, {"type": "star", "content": more}])}

    def _pair(self, key: str, schema: Any, shared: Mapping[str, Any]) -> Format:
        if self._name == "python" and not key.isidentifier():
            raise self._refused(f"the argument {key!r}, which is no name")
        style = self._style
        return in_a_row([*self._pieces(style.before + key + style.middle), self._value(schema, shared), *self._pieces(style.after)])

    def _value(self, schema: Any, shared: Mapping[str, Any]) -> Format:
        plain: Format = {"type": "json_schema", "json_schema": {**schema, **shared} if isinstance(schema, dict) else schema}
        if self._name == "python":
            return plain
        if isinstance(schema, dict) and ("enum" in schema or "const" in schema):
            return self._one_of(schema["enum"] if "enum" in schema else [schema["const"]])
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind in ("integer", "number", "boolean", "null"):
            return plain
        if kind == "string":
            return self._string(schema)
        if self._name != "gemma":
            return plain if kind in ("object", "array") else self._string({})
        return self._nested(kind, schema, shared)

    def _nested(self, kind: Any, schema: Any, shared: Mapping[str, Any]) -> Format:
        """Gemma's lists and objects, which hold texts between marks again."""
        if kind == "object":
            return in_a_row([text("{"), self._object(schema, shared), text("}")])
        if kind == "array" and isinstance(schema.get("items"), dict) and not {"minItems", "maxItems", "prefixItems"} & set(schema):
            item = self._value(schema["items"], shared)
            many = in_a_row([item, {"type": "star", "content": in_a_row([text(","), item])}])
            return in_a_row([text("["), {"type": "optional", "content": many}, text("]")])
        raise self._refused(f"a value of type {kind!r}" if kind != "array" else "a list with bounds, or without one type")

    def _one_of(self, values: list[Any]) -> Format:
        if not all(isinstance(value, str | int | None) for value in values):
            raise self._refused("an enum of more than texts and whole numbers")
        return any_of([self._quoted([text(one)]) if isinstance(one, str) else text(json.dumps(one)) for one in values])

    def _string(self, schema: Mapping[str, Any]) -> Format:
        pattern = schema.get("pattern")
        if pattern is not None:
            return self._quoted([{"type": "regex", "pattern": pattern.removeprefix("^").removesuffix("$")}])
        if {"format", "minLength", "maxLength"} & set(schema):
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            return self._quoted([{"type": "regex", "pattern": f"[^<]{{{least},{most}}}"}])
        return self._quoted([{"type": "regex", "pattern": "[^<]*"}])

    def _quoted(self, content: list[Format]) -> Format:
        return in_a_row([*self._pieces(self._quote), *content, *self._pieces(self._quote)])

    def _refused(self, what: str) -> RequestError:
        return RequestError(
            f"a call of this model's cannot be bound to {what}; leave it out, or ask with auto and without strict", param=self._param
        )


def text(value: str) -> Format:
    """A text as it stands."""
    return {"type": "const_string", "value": value}


def in_a_row(elements: list[Format]) -> Format:
    """A sequence; sequences in it and texts in a row become one."""
    out: list[Format] = []
    for one in elements:
        for part in one["elements"] if one["type"] == "sequence" else [one]:
            if out and out[-1]["type"] == part["type"] == "const_string":
                out[-1] = text(out[-1]["value"] + part["value"])
            elif part["type"] != "const_string" or part["value"]:
                out.append(part)
    return {"type": "sequence", "elements": out}


def any_of(elements: list[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
