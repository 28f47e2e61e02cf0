"""Messages of the protocol as a chat for the model's template: their blocks sorted into words, thoughts, calls and results."""

from __future__ import annotations

import json
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.anthropic.protocol import Blocks, Turn
from pagoda.serving.api.conversation import Conversation

_THOUGHTS = ("thinking", "redacted_thinking")
_OF_ROLE = {"user": ("text", "image", "document", "tool_result"), "assistant": ("text", "tool_use", *_THOUGHTS), "system": ("text",)}


def chat_of(system: str | Blocks | None, turns: list[Turn]) -> list[dict[str, Any]]:
    """The chat. Raises `RequestError` naming the block that the model cannot take."""
    chat = Conversation()
    _add(chat, "system", system or "", "system")
    for index, turn in enumerate(turns):
        _add(chat, turn.role, turn.content, f"messages[{index}].content")
    return chat.messages


def _add(chat: Conversation, role: str, content: str | Blocks, where: str) -> None:
    if isinstance(content, str):
        if content:
            chat.text(role, content)
        return
    for index, block in enumerate(content):
        _add_block(chat, role, block, f"{where}[{index}]")


def _add_block(chat: Conversation, role: str, block: dict[str, Any], where: str) -> None:
    kind = block.get("type")
    if kind not in _OF_ROLE[role]:
        takes = ", ".join(_OF_ROLE[role])
        raise RequestError(f"{where} has type {kind!r}: the served model takes {takes} from {role}", code="unsupported_content")
    if kind == "text":
        chat.text(role, _string(block, "text", where))
    elif kind == "image":
        chat.image(role, _address(block.get("source"), f"{where}.source"))
    elif kind == "document":
        chat.text(role, _document(block, where))
    elif kind == "thinking":
        chat.reasoning(_string(block, "thinking", where))
    elif kind == "tool_use":
        _add_call(chat, block, where)
    elif kind == "tool_result":
        chat.result(_string(block, "tool_use_id", where), _result_text(block, where))


def _address(source: Any, where: str) -> str:
    """Of an image block's source, base64 as a data URI."""
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return _string(source, "url", where)
    if kind != "base64":
        raise RequestError(f"{where} has type {kind!r}: this server takes base64, url", code="unsupported_content")
    return f"data:{_string(source, 'media_type', where)};base64,{_string(source, 'data', where)}"


def _document(block: dict[str, Any], where: str) -> str:
    """The words of a document of plain text, after its title and context."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text":
        words = _string(source, "data", f"{where}.source")
    elif kind == "content" and isinstance(source.get("content"), str):
        words = source["content"]
    elif kind == "content":
        parts = _parts(source.get("content"), f"{where}.source")
        words = "\n".join(_result_part(part, f"{where}.source.content[{index}]") for index, part in enumerate(parts))
    else:
        raise RequestError(f"{where}.source has type {kind!r}: of documents this server takes text, content", code="unsupported_content")
    heads = [block[name] for name in ("title", "context") if isinstance(block.get(name), str) and block[name]]
    return "\n".join((*heads, words))


def _add_call(chat: Conversation, block: dict[str, Any], where: str) -> None:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.input must be an object")
    chat.call(_string(block, "id", where), _string(block, "name", where), json.dumps(arguments, ensure_ascii=False))


def _result_text(block: dict[str, Any], where: str) -> str:
    content = block.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(_result_part(part, f"{where}.content[{index}]") for index, part in enumerate(_parts(content, where)))
    return f"Error: {content}" if block.get("is_error") else content


def _parts(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of blocks")
    return content


def _result_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(f"{where} has type {kind!r}: the served model takes text here", code="unsupported_content")
    return _string(part, "text", where)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string")
    return value
