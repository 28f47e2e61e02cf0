"""One answer to a chat, from its text to the protocol's fields: content, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET
from pagoda.serving.api.openai.replies import CalledFunction, ChatMessage, Delta, ToolCall, ToolCallDelta
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Event, Parser, Reasoning


class AnswerParts:
    """Reads one answer; `delta` takes its text as it comes, `message` takes it whole."""

    def __init__(self, parser: Parser | None, new_id: Callable[[], str], *, reasoning: bool = True, parallel: bool = True) -> None:
        """`reasoning`: show it. `parallel`: show more tool calls than the first."""
        self._parser, self._new_id = parser, new_id
        self._reasoning, self._parallel = reasoning, parallel
        self.called = False

    def finish_reason(self, reason: str | None) -> str | None:
        """A stop after tool calls is for them."""
        return "tool_calls" if reason == "stop" and self.called else reason

    def delta(self, text: str, ended: bool) -> Delta | None:
        """What this text adds; None when that is nothing yet."""
        if self._parser is None:
            return Delta(content=text) if text else None
        events = self._parser.feed(text) + (self._parser.finish() if ended else [])
        content, reasoning, calls = _joined(events), _joined(events, Reasoning), self._calls(events)
        if not self._reasoning:
            reasoning = ""
        if not (content or reasoning or calls):
            return None
        return Delta(
            content=content or UNSET, reasoning_content=reasoning or UNSET, reasoning=reasoning or UNSET, tool_calls=calls or UNSET
        )

    def message(self, role: str, echo: str, text: str) -> ChatMessage:
        """The whole answer after `echo`; content beside tool calls is null when there is none."""
        if self._parser is None:
            return ChatMessage(role=role, content=echo + text)
        delta = self.delta(text, True) or Delta()
        content = echo + (delta.content or "")
        calls = [ToolCall(id=call.id or "", function=call.function) for call in delta.tool_calls or ()]
        return ChatMessage(
            role=role,
            content=content if content or not calls else None,
            reasoning_content=delta.reasoning_content,
            reasoning=delta.reasoning,
            tool_calls=calls or UNSET,
        )

    def _calls(self, events: list[Event]) -> list[ToolCallDelta]:
        out: dict[int, ToolCallDelta] = {}
        for event in events:
            if not isinstance(event, CallName | CallArguments) or (event.index and not self._parallel):
                continue
            if isinstance(event, CallName):
                self.called = True
                function = CalledFunction(name=event.name, arguments="")
                out[event.index] = ToolCallDelta(index=event.index, id=self._new_id(), type="function", function=function)
                continue
            function = out.setdefault(event.index, ToolCallDelta(index=event.index, function=CalledFunction(arguments=""))).function
            function.arguments += event.text
        return list(out.values())


def _joined(events: list[Event], kind: Any = Content) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))
