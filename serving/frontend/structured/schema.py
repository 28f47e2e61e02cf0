"""JSON schemas before they are compiled: read, bounded, closed to unlisted properties, and checked for what a backend would ignore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.structured import MAX_DEPTH

Schema = dict[str, Any] | bool

_ONE = ("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_LATER = ("unevaluatedItems", "unevaluatedProperties", "contentSchema")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_COMBINING = ("anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies")
_OLD = ("draft-04", "draft-06", "draft-07")
NOTES = frozenset(
    ("title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly", "$defs", "definitions")
)
"""Keywords that forbid nothing."""
_SCALARS = {
    "string": frozenset(("enum", "const")),
    "integer": frozenset(("enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("enum", "const")),
    "boolean": frozenset(("enum", "const")),
    "null": frozenset[str](),
}
_XGRAMMAR = _SCALARS | {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
}
"""What xgrammar was seen to keep to the letter (`ci/json_schema_suite.py`): keywords beside an explicit type."""
_LENGTHS = frozenset(("minLength", "maxLength"))
MOST_COUNTED = 64
"""Characters that a schema's texts of bounded length may have in all for xgrammar, which compiles each place in such a text: 12 ms each for
49,000 tokens. The other library compiles none, and looks at all tokens at each of the last places instead."""
MANY_OPTIONAL = 64
"""Optional properties of an object above which xgrammar compiles for more than a second: it takes the square of their number, 4.6 s for 200
and 49,000 tokens, where llguidance takes 0.03 s."""
_CHARACTER = r'([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})))'
"""One of a JSON text, as it is written there; pairs of surrogates are left out, which are one character of two escapes."""


def read_schema(source: str, origin: str) -> Schema:
    """The schema of a text. Raises `RequestError` for one that is none, or is nested too deeply."""
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}", param=origin) from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"a JSON schema is an object, true or false, not {type(schema).__name__}", param=origin)
    check_depth(schema, origin)
    return schema


def check_depth(value: Any, origin: str) -> None:
    """Raises `RequestError` for what is nested more deeply than any grammar should be."""
    level, depth = [value], 0
    while level := [child for parent in level for child in _children(parent)]:
        depth += 1
        if depth > 2 * MAX_DEPTH:
            raise RequestError(f"it is nested more than {2 * MAX_DEPTH} levels deep", param=origin)


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(keyword, schema) of each schema that stands directly in this one."""
    for keyword in (*_ONE, *_LATER):
        if isinstance(schema.get(keyword), dict):
            yield keyword, schema[keyword]
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from ((keyword, child) for child in schema[keyword] if isinstance(child, dict))
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            yield from ((keyword, child) for child in schema[keyword].values() if isinstance(child, dict))


def walk(schema: Schema) -> Iterator[dict[str, Any]]:
    """The schema and all that stand in it."""
    if isinstance(schema, dict):
        yield schema
        for _, child in subschemas(schema):
            yield from walk(child)


def prepared(schema: Schema, closed: bool | None) -> Schema:
    """A copy in which every part means what its draft says. `closed`: see `disable_additional_properties`."""
    schema = json.loads(json.dumps(schema))
    if isinstance(schema, dict) and any(draft in str(schema.get("$schema")) for draft in _OLD):
        _drop_beside_references(schema)
    parts = list(walk(schema))
    if closed is False or any(_combines(part) for part in parts):
        return schema
    for part in parts:
        if "properties" in part and not {"additionalProperties", "patternProperties", "unevaluatedProperties"} & set(part):
            part["additionalProperties"] = False
    return schema


def _drop_beside_references(schema: dict[str, Any]) -> None:
    """Until draft 7, what stands beside `$ref` means nothing."""
    for part in list(walk(schema)):
        if isinstance(part.get("$ref"), str):
            for keyword in set(part) - {"$ref", "$schema", "$defs", "definitions", "$id"}:
                del part[keyword]


def _combines(part: dict[str, Any]) -> bool:
    """Whether objects are put together of several schemas, none of which lists all the properties."""
    return "allOf" in part or ("properties" in part and any(keyword in part for keyword in _COMBINING))


def beyond_xgrammar(schema: Schema, lengths: bool = False) -> str | None:
    """The first feature that xgrammar does not keep to the letter; None where it does. `lengths`: it gets the schema `with_lengths`."""
    if not isinstance(schema, dict):
        return f"the schema {json.dumps(schema)}"
    try:
        lacks = (lack for part in walk(schema) if (lack := _lack(part)) is not None)
        return next(lacks, None) or ("maxLength" if _counted(schema) > (MOST_COUNTED if lengths else -1) else None)
    except (TypeError, AttributeError):  # a keyword with a value of a wrong type
        return "the form of the schema"


def with_lengths(schema: Schema) -> Schema:
    """A copy for xgrammar, whose own bounds of a text's length leave out escapes: an expression for what stands between the quotes."""
    schema = json.loads(json.dumps(schema))
    for part in walk(schema):
        if _bounded(part):
            part["pattern"] = f"^{_CHARACTER}{{{part.pop('minLength', 0)},{part.pop('maxLength', '')}}}$"
    return schema


def optional_properties(schema: Schema) -> int:
    """Most of any object in it: each may be followed by any later one."""
    return max((len(set(properties) - required) for properties, required in map(_of_object, walk(schema))), default=0)


def _of_object(part: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    properties, required = part.get("properties"), part.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return (properties if isinstance(properties, dict) else {}), names


def _bounded(part: dict[str, Any]) -> bool:
    return part.get("type") == "string" and not _LENGTHS.isdisjoint(part) and not {"enum", "const"} & set(part)


def _counted(schema: Schema) -> int:
    """Characters that its texts of bounded length may have, all together; -1 where there are none such."""
    bounded = [part for part in walk(schema) if _bounded(part)]
    return sum(int(part.get("maxLength", part.get("minLength", 0))) for part in bounded) if bounded else -1


def _lack(part: dict[str, Any]) -> str | None:
    keywords = set(part) - NOTES
    if "$ref" in part:
        local = isinstance(part["$ref"], str) and part["$ref"].startswith(("#/$defs/", "#/definitions/"))
        return _beyond(keywords, {"$ref"}) if local else f"$ref={part['$ref']!r}"
    if "anyOf" in part:
        return _beyond(keywords, {"anyOf"})
    kind = part.get("type")
    if (kind is None and keywords and keywords <= {"enum", "const"}) or not keywords:
        return _values(part)
    if not isinstance(kind, str) or kind not in _XGRAMMAR:
        return "a schema without a type" if kind is None else f"type={kind!r}"
    lengths = _LENGTHS if _bounded(part) else frozenset[str]()
    return _beyond(keywords, {"type", *_XGRAMMAR[kind], *lengths}) or _values(part) or _shape(part)


def _beyond(keywords: set[str], known: set[str]) -> str | None:
    return next(iter(sorted(keywords - known)), None)


def _values(part: dict[str, Any]) -> str | None:
    values = [*(part.get("enum") or []), *([part["const"]] if "const" in part else [])]
    kinds = {"string": str, "integer": int, "boolean": bool}
    wanted = kinds.get(part.get("type", ""), str | int | None)
    fits = all(isinstance(value, wanted) and (isinstance(value, bool) == (wanted is bool) or "type" not in part) for value in values)
    return None if fits and not ("enum" in part and "const" in part) and part.get("enum") != [] else "enum or const"


def _shape(part: dict[str, Any]) -> str | None:
    if part["type"] == "object":
        if part.get("additionalProperties") is not False:
            return "additionalProperties"
        return None if set(part.get("required", ())) <= set(part.get("properties", ())) else "required"
    if part["type"] == "array":
        return "items" if not isinstance(part.get("items", {}), dict) else _bounds(part, "minItems", "maxItems", 1000)
    if part["type"] == "string" and _bounded(part):
        return "minLength" if part.get("minLength", 0) < 0 else _bounds(part, "minLength", "maxLength", MOST_COUNTED)
    return _bounds(part, "minimum", "maximum", 10**15)


def _bounds(part: dict[str, Any], least: str, most: str, limit: int) -> str | None:
    for name in (least, most, "exclusiveMinimum", "exclusiveMaximum"):
        if name in part and (not isinstance(part[name], int) or isinstance(part[name], bool) or abs(part[name]) > limit):
            return name
    return None if part.get(least, -limit) <= part.get(most, limit) else least
