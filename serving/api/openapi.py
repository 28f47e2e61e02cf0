"""The OpenAPI document of this server, which `/openapi.json` gives: made from the records that the endpoints read and write."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from pagoda.serving.api.anthropic.errors import ErrorRecord
from pagoda.serving.api.errors import ErrorEnvelope
from pagoda.serving.api.operations_table import EVENTS, FORM, JSON, OPERATIONS, TEXT, Operation

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]


def document(version: str) -> Schema:
    """The document, of OpenAPI 3.1."""
    kinds = [kind for one in OPERATIONS for kind in (one.asks, *one.replies) if kind]
    schemas, components = msgspec.json.schema_components([*kinds, ErrorEnvelope, ErrorRecord], ref_template=REF)
    known = dict(zip([*map(_key, kinds), "error", "anthropic"], schemas, strict=True))
    paths: dict[str, Schema] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagoda", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _key(kind: Any) -> str:
    return str(kind)


def _operation(one: Operation, known: dict[str, Schema]) -> Schema:
    error = known["anthropic" if one.path.startswith("/v1/messages") else "error"]
    out: Schema = {
        "operationId": one.name,
        "summary": one.summary,
        "parameters": [_parameter(name, "path") for name in re.findall(r"{(\w+)}", one.path)]
        + [_parameter(name, "query") for name in one.query],
        "responses": {
            "200": {"description": "Done", **({"content": _reply(one, known)} if one.media else {})},
            **{status: {"description": what, "content": {JSON: {"schema": error}}} for status, what in _ERRORS.items()},
        },
    }
    if one.asks is not None:
        schema = known[_key(one.asks)]
        body = {"allOf": [schema, _FILE]} if one.sent_as == FORM else schema
        out["requestBody"] = {"required": True, "content": {one.sent_as: {"schema": body}}}
    return out


def _parameter(name: str, where: str) -> Schema:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}


def _reply(one: Operation, known: dict[str, Schema]) -> Schema:
    if one.gives is None:
        return {one.media: {"schema": {"type": "string"}}}
    records = [known[_key(kind)] for kind in one.replies]
    content: Schema = {JSON: {"schema": {"anyOf": records} if len(records) > 1 else records[0] if records else {}}}
    if one.streams:
        content[EVENTS] = {"schema": _EVENT}
    if one.sent_as == FORM:
        content[TEXT] = {"schema": {"type": "string"}}
    return content


_EVENT = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}, "required": ["data"]}
_FILE = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
_ERRORS = {
    "400": "The request is wrong; `param` names the field",
    "401": "No key, or a wrong one",
    "404": "No such model, response or path",
    "413": "The body is above the server's limit",
    "415": "The body is declared as something else",
    "429": "The queue is full, or a key is above its share",
    "500": "A bug of the server",
    "503": "The server shuts down, or its engine died",
    "504": "The request took longer than the server lets any",
    "529": "As 503, in Anthropic's protocol",
}
