"""Chat messages as templates want them: text parts joined or kept, tool arguments parsed, reasoning under each of its names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pagoda.hal.errors import RequestError

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Part types that are text, and the key that holds it."""

MEDIA_PARTS = ({"type": "image"}, {"type": "video"}, {"type": "audio"})
"""Where media stand, for templates that take parts."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ContentFormat(NamedTuple):
    """What a template can read as `message.content`: lists of parts, strings (at least one of them), and whether it asks for none."""

    parts: bool
    strings: bool
    none: bool = False


def normalise(messages: Sequence[Mapping[str, Any]], form: ContentFormat) -> list[dict[str, Any]]:
    """Fresh messages for a template that reads `form`; the caller's own are not touched.

    Raises `RequestError` for what is no message, and for parts that are not text.
    """
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    return [_message(message, index, form) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], index: int, form: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role", param=f"messages[{index}]")
    fresh = {key: value for key, value in message.items() if value is not None or key == "content"}
    fresh["content"] = _content(message.get("content"), f"messages[{index}].content", form)
    if fresh.get("tool_calls"):
        fresh["tool_calls"] = _tool_calls(fresh["tool_calls"], f"messages[{index}].tool_calls")
    reasoning = next((fresh[key] for key in REASONING_KEYS if key in fresh), None)
    return fresh if reasoning is None else {"thinking": reasoning, **fresh, "reasoning_content": reasoning}


def _content(content: Any, where: str, form: ContentFormat) -> str | list[dict[str, Any]] | None:
    if content is None:
        return None if form.none else "" if form.strings else []
    if isinstance(content, str):
        return content if form.strings else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    if form.parts:
        return [dict(part) if part in MEDIA_PARTS else _text_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _text_part(part: Any, where: str) -> dict[str, Any]:
    return {"type": "text", "text": _part_text(part, where)}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise RequestError(f"{where} has type {kind!r}: this model takes {', '.join(TEXT_PARTS)}", param=where)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.{TEXT_PARTS[kind]} must be a string", param=where)
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where} must be a list of objects", param=where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Templates print arguments as objects, the protocol carries them as JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments", ""), str):
        return dict(call)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}.function.arguments is not valid JSON: {error}", param=where) from error
    return {**call, "function": {**function, "arguments": arguments}}
