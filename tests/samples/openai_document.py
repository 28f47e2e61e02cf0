"""OpenAI's document of its API in terms of JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

DOCUMENT = Path(__file__).resolve().parents[3] / "shared/data/openai-openapi/openapi.json"


def with_null(node: Any) -> Any:
    """OpenAPI's `nullable` in terms of JSON Schema."""
    if isinstance(node, list):
        return [with_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: with_null(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [out, {"type": "null"}]} if node.get("nullable") is True else out


def checker() -> Callable[[str, Any], None] | None:
    """Fails where a record is not what the document's schema of that name says; None where the document is missing."""
    if not DOCUMENT.is_file():
        return None
    schemas = with_null(json.loads(DOCUMENT.read_text())["components"])

    def check(name: str, record: Any) -> None:
        validator = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": schemas})
        problems = [(list(error.absolute_path), error.message[:200]) for error in validator.iter_errors(record)]
        assert not problems, (name, problems, record)

    return check
