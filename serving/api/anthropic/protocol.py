"""Requests of the Messages protocol, with `vllm serve`'s extra fields, as typed records."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pagoda.serving.api.openai.protocol import Int32, Name

Blocks = list[dict[str, Any]]


class Turn(msgspec.Struct, kw_only=True):
    """One message. `system` inside the conversation is newer than the protocol's first clients."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(msgspec.Struct, kw_only=True):
    """A tool of the client's. `type` names one of the protocol's own tools otherwise."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether and which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first, and whether that is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The JSON that the answer must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much effort, and which form."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`: what makes the prompt. `chat_template_kwargs` are extra."""

    model: str
    messages: list[Turn]
    system: str | Blocks | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # declared so that they are refused by name
    mcp_servers: Any = None
    container: Any = None
    # accepted and without effect
    cache_control: Any = None
    context_management: Any = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`. `seed`, `priority` and `cache_salt` are extra."""

    max_tokens: int
    stop_sequences: Annotated[list[Name], msgspec.Meta(max_length=64)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    priority: Int32 | None = None
    cache_salt: Name | None = None
    # accepted and without effect: they name the client or where it is served
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    speed: Any = None
