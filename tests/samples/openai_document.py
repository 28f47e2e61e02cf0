"""OpenAI's document of its API in terms of JSON Schema."""

from __future__ import annotations

from typing import Any


def with_null(node: Any) -> Any:
    """OpenAPI's `nullable` in terms of JSON Schema."""
    if isinstance(node, list):
        return [with_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: with_null(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [out, {"type": "null"}]} if node.get("nullable") is True else out
