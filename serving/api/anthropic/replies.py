"""Replies and stream events of the Messages protocol."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pagoda.serving.api.blocks import Block, Count, Ending

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class OutputDetails(msgspec.Struct):
    """Generated tokens that were thought."""

    thinking_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that the prefix cache did not have."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class Message(msgspec.Struct, kw_only=True):
    """Reply of `/v1/messages`; `content` holds blocks as the protocol has them."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Usage


class TokenCount(msgspec.Struct):
    """Reply of `/v1/messages/count_tokens`."""

    input_tokens: int


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model, or another name of it."""

    id: str
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, kw_only=True):
    """Reply of `/v1/models` in this protocol: all of them."""

    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False


class StreamEvent(msgspec.Struct, kw_only=True):
    """Any event of a stream; each type has some of the fields."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: dict[str, Any] | UnsetType = UNSET
    delta: dict[str, Any] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


def usage_of(count: Count) -> Usage:
    return Usage(
        input_tokens=count.prompt - count.cached,
        cache_read_input_tokens=count.cached,
        output_tokens=count.generated,
        output_tokens_details=OutputDetails(count.reasoning),
    )


def stop_of(ending: Ending, clipped: bool) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`. `clipped`: the context ended before what `max_tokens` asked for."""
    if ending.stop_string is not None:
        return "stop_sequence", ending.stop_string
    if ending.reason == "length" and clipped:
        return "model_context_window_exceeded", None
    return STOP_REASONS[ending.reason], None


def block_of(block: Block, hide_thinking: bool) -> dict[str, Any]:
    """A whole block. Arguments that were cut short, or are no object, become an empty one."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": "" if hide_thinking else block.text, "signature": signature(block)}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(block.text)}


def empty_block(block: Block) -> dict[str, Any]:
    """A block as it begins."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def signature(block: Block) -> str:
    """The protocol wants one on every thought; nothing is proved by ours."""
    return hashlib.sha256(block.text.encode()).hexdigest()


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
