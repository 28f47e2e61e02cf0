"""How one model's answers are read: reasoning first, tool calls in what is left."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.serving.frontend.parsers.events import Content, Context, Event, Family, Parser, new_call_id


@dataclass(frozen=True)
class AnswerFormat:
    """The parsers of one model; None where it has none."""

    tools: Family | None = None
    reasoning: Family | None = None

    def parser(self, context: Context) -> Parser | None:
        """For one answer; tool calls are looked for when the request offers tools. None: all text is content."""
        parsers = [self.reasoning.make(context)] if self.reasoning else []
        if self.tools and context.tools:
            parsers.append(self.tools.make(context))
        return Chain(*parsers) if len(parsers) > 1 else parsers[0] if parsers else None

    def call_id(self) -> str:
        """An id for a new tool call."""
        return self.tools.call_id() if self.tools else new_call_id()

    def marks(self, tools: bool) -> tuple[str, ...]:
        """Texts that the parsers must see, even where they are special tokens."""
        families = [family for family in (self.reasoning, self.tools if tools else None) if family]
        return tuple(mark for family in families for mark in family.marks)


class Chain:
    """Two parsers in a row: what the first says is content goes through the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Event]:
        return self._through(self._first.feed(text))

    def finish(self) -> list[Event]:
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, events: list[Event]) -> list[Event]:
        out: list[Event] = []
        for event in events:
            out.extend(self._second.feed(event.text) if isinstance(event, Content) else [event])
        return out
