"""A request of the Messages protocol as the chat request that it amounts to, so that everything behind chat serves it."""

from __future__ import annotations

from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.anthropic.content import chat_of
from pagoda.serving.api.anthropic.protocol import CountRequest, MessagesRequest, Thinking, Tool, ToolChoice
from pagoda.serving.api.openai.protocol import ChatRequest

_REFUSED = ("mcp_servers", "container")
_SETTINGS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "priority", "cache_salt")
_LEAST_BUDGET = 1024


def chat_request(body: CountRequest) -> ChatRequest:
    """Raises `RequestError` for what cannot be served, by the names of this protocol."""
    for name in _REFUSED:
        if getattr(body, name):
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name, code="unsupported_parameter")
    messages = chat_of(body.system, body.messages)
    goes_on = bool(messages) and messages[-1]["role"] == "assistant"
    request = ChatRequest(
        model=body.model,
        messages=messages,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        chat_template_kwargs={**_thinking_variables(body.thinking), **(body.chat_template_kwargs or {})},
    )
    _add_choice(request, body.tool_choice)
    if body.output_config is not None:
        _add_output(request, body)
    if isinstance(body, MessagesRequest):
        _add_settings(request, body)
    return request


def _add_choice(request: ChatRequest, choice: ToolChoice | None) -> None:
    if choice is None:
        return
    if choice.type == "tool":
        if not choice.name:
            raise RequestError("tool_choice.name is missing; it must be a tool's name", param="tool_choice")
        request.tool_choice = {"type": "function", "function": {"name": choice.name}}
    else:
        request.tool_choice = "required" if choice.type == "any" else choice.type
    request.parallel_tool_calls = not choice.disable_parallel_tool_use


def _add_output(request: ChatRequest, body: CountRequest) -> None:
    assert body.output_config is not None
    request.reasoning_effort = body.output_config.effort
    if body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema}
        request.response_format = {"type": "json_schema", "json_schema": schema}


def _add_settings(request: ChatRequest, body: MessagesRequest) -> None:
    for name in _SETTINGS:
        setattr(request, name, getattr(body, name))
    request.stop = body.stop_sequences
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens={body.max_tokens} must be at least 1", param="max_tokens")
    budget = body.thinking.budget_tokens if body.thinking else None
    if budget is not None and not _LEAST_BUDGET <= budget < body.max_tokens:
        raise RequestError(
            f"thinking.budget_tokens={budget} is out of range: it must be at least {_LEAST_BUDGET} and below max_tokens={body.max_tokens}"
        )


def _thinking_variables(thinking: Thinking | None) -> dict[str, Any]:
    """Templates know the switch under these two names; `adaptive` leaves it to the model."""
    if thinking is None or thinking.type == "adaptive":
        return {}
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens is missing; it is required with thinking.type enabled")
    on = thinking.type == "enabled"
    return {"enable_thinking": on, "thinking": on}


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{where}.type is {tool.type!r}: this server runs no tools of its own; there is custom", param=where)
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing; it is required", param=where)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
