"""`response_format`: the JSON that an answer must be."""

from __future__ import annotations

import json
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import GenerationRequest
from pagoda.serving.frontend.structured import installed


def structured_output(request: GenerationRequest) -> tuple[str, str] | None:
    """As `SamplingParams.structured`; None for text. Raises `RequestError` for a format that there is not."""
    wanted = request.response_format
    if wanted is None or wanted.get("type") == "text":
        return None
    kind = wanted.get("type")
    if kind not in ("json_object", "json_schema"):
        raise _refused(f"response_format.type={kind!r} is not supported by this server; there is text, json_object and json_schema")
    if not installed():
        raise _refused(
            'response_format is not supported by this server: it lacks the package xgrammar; pip install "pagoda-llm[structured]"'
        )
    if getattr(request, "tools", None) and getattr(request, "tool_choice", None) != "none":
        raise _refused("response_format is not supported together with tools: a grammar leaves no room for calls; send one of them")
    return (kind, "") if kind == "json_object" else (kind, json.dumps(_schema(wanted.get("json_schema"))))


def _schema(given: Any) -> dict[str, Any]:
    schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise RequestError("response_format.json_schema.schema is missing; it must be a JSON schema", param="response_format")
    return schema


def _refused(message: str) -> RequestError:
    return RequestError(message, param="response_format", code="unsupported_parameter")
