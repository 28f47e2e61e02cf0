"""What a parser says about an answer, and the protocol that every parser follows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model thought before it answered."""

    text: str


class CallName(NamedTuple):
    """Tool call `index` (from 0) begins; said once, before its arguments."""

    index: int
    name: str


class CallArguments(NamedTuple):
    """A piece of call `index`'s arguments: the pieces joined are JSON text."""

    index: int
    text: str


Kind = type[Content] | type[Reasoning]
Event = Content | Reasoning | CallName | CallArguments


class Parser(Protocol):
    """Reads one answer. How the text is cut into pieces changes how the events are cut, never what they say together."""

    def feed(self, text: str) -> list[Event]:
        """What this piece makes certain; text that may yet become a mark is held."""
        ...

    def finish(self) -> list[Event]:
        """The rest, at the end of the answer: held text that became nothing else is content."""
        ...


@dataclass(frozen=True)
class Context:
    """What a parser may know of its request: `tools` maps names to JSON schemas of arguments, `prompt_end` is the prompt's last text;
    `forced`: the answer is calls, so that what its end cuts off is the beginning of one."""

    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prompt_end: str = ""
    forced: bool = False


class Hints(NamedTuple):
    """What a checkpoint's tokenizer says of its answers: its added tokens, and its own description of them, where it has one."""

    words: Sequence[str] = ()
    response: Mapping[str, Any] | None = None


NO_HINTS = Hints()

PROMPT_END = 32
"""Tokens that hold any mark of reasoning which the template may have opened."""


def new_call_id() -> str:
    """As OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class CallShape:
    """How calls are written, for a grammar of them.

    Attributes:
        open: what each call begins with, the same for all tools. head: what comes between it and the arguments; NAME stands for the tool's.
        close: what ends a call. before, between, after: around and between calls.
        trigger: what in a text says that calls begin; empty where only a whole answer is calls.
        marks: texts in these that may be special tokens.
        bare_name: the name is no JSON text. style: how arguments are written, xgrammar's word or one of `keyed.STYLES`; quote: what
            stands around texts there; suffix: what stands behind each tag's name.
        sayings: what may be said before, each between two texts; final: what begins an answer without calls, where that needs a mark.
        needs: a special token that the vocabulary of models has which write like this.
    """

    open: str
    head: str
    close: str
    before: str = ""
    between: str = ""
    after: str = ""
    trigger: str = ""
    marks: tuple[str, ...] = ()
    bare_name: bool = False
    style: str = "json"
    quote: str = ""
    suffix: str = ""
    sayings: tuple[tuple[str, str], ...] = ()
    final: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Family:
    """A way in which models write reasoning or tool calls.

    Attributes:
        kind: which of the two. names: what the server's flags call it.
        make: a parser for one answer.
        signs: texts of which a chat template of this family holds one, or several all together; marks: texts that the parser must
            see, which a tokenizer may have as special tokens.
        call_id: a new id for a tool call, of the form that the family's templates take.
        shapes: for a grammar of calls; the first that suits the vocabulary counts, and without any no call can be forced.
        opens, closes: around reasoning. counted: the same where it is part of the answer's form, so that only a budget looks for it.
        fitted: the same for a checkpoint, where that says how marks are spelled.
    """

    kind: Literal["tools", "reasoning"]
    names: tuple[str, ...]
    make: Callable[[Context], Parser]
    signs: tuple[str | tuple[str, ...], ...] = ()
    marks: tuple[str, ...] = ()
    call_id: Callable[[], str] = new_call_id
    shapes: tuple[CallShape, ...] = ()
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    counted: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    fitted: Callable[[Hints], Family] | None = None

    def signed(self, template: str) -> bool:
        """Whether a chat template is of this family."""
        return any(all(part in template for part in ([sign] if isinstance(sign, str) else sign)) for sign in self.signs)
