"""A request of the Responses API as the chat request that it amounts to, so that everything behind chat serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.openai.responses_items import chat_of
from pagoda.serving.api.openai.responses_protocol import Extras, Item, ResponseRequest

NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format", "prompt": "input"}
"""Names in errors of chat → names here."""


def chat_request(body: ResponseRequest, context: Sequence[Item]) -> ChatRequest:
    """`context`: all items of the conversation. Raises `RequestError` for tools and choices that cannot be served."""
    request = ChatRequest(
        model=body.model,
        messages=chat_of(body.instructions, context),
        max_completion_tokens=body.max_output_tokens,
        tools=[_chat_tool(tool) for tool in tools_of(body)] or None,
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body),
        logprobs=body.tells_logprobs,
        top_logprobs=body.top_logprobs if body.tells_logprobs else None,
    )
    for name in Extras.__struct_fields__:
        setattr(request, name, getattr(body, name))
    request.verbosity = body.text.verbosity if body.text else None
    effort = body.reasoning.effort if body.reasoning else None
    request.reasoning_effort = effort
    if effort == "none":  # templates know the switch under these two names
        request.chat_template_kwargs = {"enable_thinking": False, "thinking": False, **(body.chat_template_kwargs or {})}
    return request


def tools_of(body: ResponseRequest) -> list[dict[str, Any]]:
    """The tools with every field that the protocol's answers have."""
    tools = body.tools or []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise RequestError(
                f"tools[{index}].type is {tool.get('type')!r}: this server runs no tools of its own; there is function",
                param=f"tools[{index}]",
                code="unsupported_parameter",
            )
    return [{"strict": None, "parameters": None, **tool} for tool in tools]


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type" and value is not None}}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return _named(choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_named(tool) if isinstance(tool, dict) else tool for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def _named(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}


def _format(body: ResponseRequest) -> dict[str, Any] | None:
    given = body.text.format if body.text else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
