"""The tools that a chat request offers, checked, and which of them must be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.openai.structured import check_installed, refused, structured_output
from pagoda.serving.engine.structured import StructuredOutputsParams
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.structured.answers import ToolRule, answer_structure
from pagoda.serving.frontend.structured.tool_calls import OfferedTool
from pagoda.serving.frontend.text import Tokenizer

Schemas = dict[str, Mapping[str, Any]]


class Choice(NamedTuple):
    """`tool_choice`: whether some tool must be called, and the names that may be, None for all."""

    forced: bool = False
    names: tuple[str, ...] | None = None


def offered_tools(request: ChatRequest, answers: AnswerFormat) -> Schemas:
    """Schemas of the arguments by tool name; empty when there are no tools, or `tool_choice` is none.

    Raises `RequestError` for tools that are none, for a model that cannot call tools, and for a choice that cannot be kept.
    """
    choice = _choice(request.tool_choice)
    if not request.tools:
        if choice is not None and choice.forced:
            raise RequestError("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return {}
    schemas = dict(_schema(tool, f"tools[{index}]") for index, tool in enumerate(request.tools))
    if choice is None:
        return {}
    if missing := [name for name in choice.names or () if name not in schemas]:
        raise RequestError(f"tool_choice names {missing[0]!r}, which is not among the tools: {', '.join(schemas)}", param="tool_choice")
    if answers.tools is None:
        raise refused(
            "tools are not supported by the served model: its chat template does not show them; leave them out, or start the server"
            " with another --chat-template, or with --tool-call-parser",
            "tools",
        )
    return schemas


def call_forced(request: ChatRequest) -> bool:
    """Whether the answer must be calls."""
    return (_choice(request.tool_choice) or Choice()).forced


def chat_structure(
    request: ChatRequest, schemas: Schemas, answers: AnswerFormat, tokenizer: Tokenizer, prompt_end: str
) -> StructuredOutputsParams | None:
    """What the answer must look like, calls included; `schemas` are `offered_tools`."""
    choice = _choice(request.tool_choice) or Choice()
    allowed = {name: schema for name, schema in schemas.items() if choice.names is None or name in choice.names}
    strict = {tool["function"]["name"]: _strict(tool) for tool in request.tools or () if schemas}
    tools = [OfferedTool(name, schema if _binds(choice, strict[name]) else None) for name, schema in allowed.items()]
    rule = ToolRule(choice.forced, request.parallel_tool_calls is not False, "tool_choice" if choice.forced else "tools")
    made = answer_structure(structured_output(request), tools, rule, answers, tokenizer, prompt_end)
    if made is not None:
        check_installed(made.origin)
    return made


def _binds(choice: Choice, strict: bool | None) -> bool:
    """Arguments keep to the schema where the tool is strict, and where a call is forced unless it is said not to be."""
    return bool(strict) or (choice.forced and strict is None)


def _strict(tool: dict[str, Any]) -> bool | None:
    strict = tool["function"].get("strict", tool.get("strict"))
    return strict if isinstance(strict, bool) else None


def _choice(choice: Any) -> Choice | None:
    """None for the choice of none."""
    if choice in (None, "auto"):
        return Choice()
    if choice == "none":
        return None
    if choice == "required":
        return Choice(forced=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        names = tuple(_name(tool) for tool in allowed.get("tools") or ())
        return Choice(allowed.get("mode") == "required", names)
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        return Choice(True, (_name(choice),))
    raise refused(f"tool_choice={choice!r} is none of auto, none, required, a function by name, and allowed_tools", "tool_choice")


def _name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice.function.name is missing; it must be a tool's name", param="tool_choice")
    return name


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
