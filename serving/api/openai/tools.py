"""The tools that a chat request offers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.frontend.parsers.answers import AnswerFormat

Schemas = dict[str, Mapping[str, Any]]


def offered_tools(request: ChatRequest, answers: AnswerFormat) -> Schemas:
    """Schemas of the arguments by tool name; empty when there are no tools, or `tool_choice` is none.

    Raises `RequestError` for tools that are none, for a model that cannot call tools, and for a choice that cannot be kept.
    """
    _check_choice(request.tool_choice)
    if not request.tools:
        return {}
    schemas = dict(_schema(tool, f"tools[{index}]") for index, tool in enumerate(request.tools))
    if request.tool_choice == "none":
        return {}
    if answers.tools is None:
        raise RequestError(
            "tools are not supported by the served model: its chat template does not show them; leave them out, or start the server"
            " with another --chat-template, or with --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    return schemas


def _check_choice(choice: Any) -> None:
    if choice in (None, "none", "auto"):
        return
    raise RequestError(
        f"tool_choice={choice!r} is not supported by this server yet: no call can be forced; use auto or none",
        param="tool_choice",
        code="unsupported_parameter",
    )


def _schema(tool: dict[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {tool['type']!r}; it must be function", param=where)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name is missing; it must be the tool's name", param=where)
    schema = function.get("parameters") or {}
    if not isinstance(schema, dict):
        raise RequestError(f"{where}.function.parameters must be a JSON schema, which is an object", param=where)
    return name, schema
