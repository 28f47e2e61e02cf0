"""Items of the Responses API: those of a request made complete, and all of them as a chat for the model's template."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.conversation import Conversation
from pagoda.serving.api.openai.responses_protocol import Item

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_item_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A part of an assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}


def items_of(given: str | list[Item] | None) -> list[Item]:
    """Fresh items with ids. Raises `RequestError` naming the item, or the part of it, that the model cannot take."""
    if given is None:
        raise RequestError("input is missing; it is required", param="input", code="missing_field")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def chat_of(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """The chat that complete items come to."""
    chat = Conversation()
    if instructions:
        chat.text("system", instructions)
    for item in items:
        match item["type"]:
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                for part in item["content"]:
                    if part["type"] == "input_image":
                        chat.image(role, part["image_url"], part["detail"])
                    else:
                        chat.text(role, part["text"])
            case "reasoning":
                chat.reasoning("".join(part["text"] for part in item["content"] or item["summary"]))
            case "function_call":
                chat.call(item["call_id"], item["name"], item["arguments"])
            case "function_call_output":
                chat.result(item["call_id"], _joined(item["output"]))
    return chat.messages


def _joined(output: str | list[dict[str, Any]]) -> str:
    return output if isinstance(output, str) else "\n".join(part["text"] for part in output)


def _item(item: Item, where: str) -> Item:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise RequestError(
            f"{where} has type {kind!r}: this server takes {', '.join(_PREFIXES)}", param=where, code="unsupported_parameter"
        )
    given = item.get("id")
    whole = {"id": given if given and isinstance(given, str) else new_item_id(kind), "type": kind}
    match kind:
        case "message":
            return {**whole, **_message(item, where), "status": "completed"}
        case "reasoning":
            parts = {name: _parts(item.get(name) or [], f"{where}.{name}") for name in ("summary", "content")}
            return {**whole, "summary": _typed(parts["summary"], "summary_text"), "content": _typed(parts["content"], "reasoning_text")}
        case "function_call":
            return {**whole, **{name: _string(item, name, where) for name in ("call_id", "name", "arguments")}, "status": "completed"}
        case _:
            output = item.get("output")
            if not isinstance(output, str):
                output = _typed(_parts(output, f"{where}.output"), "input_text")
            return {**whole, "call_id": _string(item, "call_id", where), "output": output, "status": "completed"}


def _message(item: Item, where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}; it must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if role == "user" and isinstance(content, list):
        return {"role": role, "content": [_seen_or_read(part, f"{where}.content[{index}]") for index, part in enumerate(content)]}
    texts = [content] if isinstance(content, str) else _parts(content, f"{where}.content")
    parts = [text_part(text) for text in texts] if role == "assistant" else _typed(texts, "input_text")
    return {"role": role, "content": parts}


def _seen_or_read(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return {"type": "input_text", "text": _text(part, where)}
    if part.get("file_id"):
        raise RequestError(f"{where}.file_id: this server keeps no files; send image_url", param=where, code="unsupported_parameter")
    return {"type": "input_image", "image_url": _string(part, "image_url", where), "detail": part.get("detail") or "auto", "file_id": None}


def _parts(content: Any, where: str) -> list[str]:
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    return [_text(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    names = _TEXTS | {"reasoning_text": "text", "summary_text": "text"}
    if not isinstance(kind, str) or kind not in names:
        raise RequestError(f"{where} has type {kind!r}: the served model takes text", param=where, code="unsupported_parameter")
    return _string(part, names[kind], where)


def _typed(texts: list[str], kind: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def _string(record: Item, name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
