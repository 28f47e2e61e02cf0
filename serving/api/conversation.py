"""Conversations put together piece by piece, as chat templates want them: turns of one role joined, results after their calls."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Messages in the making. Each protocol says what it finds; `messages` is the chat that it comes to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def text(self, role: str, text: str) -> None:
        """Words of a role; they join its turn, unless that has called tools already."""
        turn = self._turn(role)
        if turn.get("tool_calls"):
            turn = self._begin(role)
        if not turn["content"]:
            turn["content"] = text
            return
        if isinstance(turn["content"], str):
            turn["content"] = [_part(turn["content"])]
        turn["content"].append(_part(text))

    def image(self, role: str, address: str, detail: str | None = None) -> None:
        """A picture that a role shows, by its address."""
        turn = self._turn(role)
        content = turn["content"]
        if isinstance(content, str):
            content = turn["content"] = [_part(content)] if content else []
        content.append({"type": "image_url", "image_url": {"url": address, "detail": detail}})

    def reasoning(self, text: str) -> None:
        """What the assistant thought before it spoke."""
        turn = self._turn("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant; `arguments` is JSON text."""
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, text: str) -> None:
        """What a call came to."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _turn(self, role: str) -> dict[str, Any]:
        return self.messages[-1] if self.messages and self.messages[-1]["role"] == role else self._begin(role)

    def _begin(self, role: str) -> dict[str, Any]:
        self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
