"""An answer as a row of blocks (reasoning, text, tool calls), for protocols that send it so; whole answers and streams alike."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pagoda.hal.errors import PagodaError
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.events import CallArguments, CallName, Content, Context, Event, Reasoning

if TYPE_CHECKING:
    from pagoda.serving.api.outlet import Outlet
    from pagoda.serving.api.service import Service, Step


@dataclass
class Block:
    """One block so far. `name` and `call_id` are those of a tool call, whose text is its arguments as JSON. `logprobs`: of a text's tokens,
    in the protocol's form, where they were asked for."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""
    call_id: str = ""
    ended: bool = False
    logprobs: list[Any] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class Opened(NamedTuple):
    """A block begins; the one before it has closed."""

    block: Block


class Grown(NamedTuple):
    """A block gains text, and what is known of its tokens."""

    block: Block
    text: str
    logprobs: Sequence[Any] = ()


class Closed(NamedTuple):
    """A block is whole; it never opens again."""

    block: Block


Change = Opened | Grown | Closed


@dataclass
class Count:
    """Tokens of one request; `reasoning` is the part of `generated` that was thought."""

    prompt: int
    generated: int = 0
    cached: int = 0
    reasoning: int = 0


class Ending(NamedTuple):
    """Why an answer ended, `stop` after tool calls being `tool_calls`; `stop_string` where one ended it."""

    reason: str
    stop_string: str | None


class BlockReader:
    """Sorts one answer's text into blocks."""

    def __init__(self, answers: AnswerFormat, context: Context, *, reasoning: bool = True, parallel: bool = True) -> None:
        """`reasoning`: show it. `parallel`: show more tool calls than the first."""
        self._answers, self._parser = answers, answers.parser(context)
        self.seeks_calls = bool(answers.tools and context.tools)
        self._reasoning, self._parallel = reasoning, parallel
        self._thinking = False
        self.blocks: list[Block] = []

    def feed(self, text: str, tokens: int, ended: bool, count: Count) -> list[Change]:
        """What this text, of so many tokens, changes; at the end of the answer all blocks close."""
        changes: list[Change] = []
        thought = self._thinking
        for event in self._events(text, ended):
            thought = thought or isinstance(event, Reasoning)
            self._thinking = isinstance(event, Reasoning)
            changes += self._changes(event)
        count.generated += tokens
        count.reasoning += tokens if thought else 0
        return [*changes, *self._close()] if ended else changes

    @property
    def called(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def _events(self, text: str, ended: bool) -> list[Event]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._parser.feed(text) + (self._parser.finish() if ended else [])

    def _changes(self, event: Event) -> list[Change]:
        match event:
            case Reasoning(text):
                return self._more("reasoning", text) if self._reasoning else []
            case Content(text):
                return self._more("text", text)
            case CallName(index, name):
                return self._open(Block("call", len(self.blocks), name, self._answers.call_id())) if self._shows(index) else []
            case CallArguments(index, text):
                return [self._grow(text)] if self._shows(index) else []

    def _shows(self, call: int) -> bool:
        return self._parallel or call == 0

    def _more(self, kind: Literal["reasoning", "text"], text: str) -> list[Change]:
        if not text:
            return []
        same = self.blocks and self.blocks[-1].kind == kind and not self.blocks[-1].ended
        opening = [] if same else self._open(Block(kind, len(self.blocks)))
        return [*opening, self._grow(text)]

    def _open(self, block: Block) -> list[Change]:
        changes = [*self._close(), Opened(block)]
        self.blocks.append(block)
        return changes

    def _grow(self, text: str) -> Change:
        self.blocks[-1].add(text)
        return Grown(self.blocks[-1], text)

    def _close(self) -> list[Change]:
        if not self.blocks or self.blocks[-1].ended:
            return []
        self.blocks[-1].ended = True
        return [Closed(self.blocks[-1])]


class Answering:
    """One request of one sequence on its way: its blocks, its tokens, and its end once there is one."""

    def __init__(
        self,
        service: Service,
        request: EngineRequest,
        reader: BlockReader,
        logprobs: Callable[[Sequence[TokenLogprobs]], list[Any]] = list,
        name: str = "other",
    ) -> None:
        """`logprobs`: puts those of a text into the protocol's form. `name`: of the protocol, for the metrics."""
        self._name = name
        self._service, self._request, self._reader, self._logprobs = service, request, reader, logprobs
        self._unsaid: list[TokenLogprobs] = []
        self.count = Count(len(request.prompt))
        self.ending: Ending | None = None

    @property
    def blocks(self) -> list[Block]:
        return self._reader.blocks

    async def changes(self, *, patient: bool = False, outlet: Outlet | None = None) -> AsyncGenerator[list[Change], None]:
        """What each engine step brings, the first one even when that is nothing yet; `patient`: what several steps bring. Leaving it ends
        the request in the engine. What goes through `outlet` is not yielded.

        Raises `DrainingError` when the server ended the request because it stops, `AbortedError` when somebody ended it.
        """
        apart = self._request.params.logprobs is not None  # to know which text is which token's
        async with aclosing(self._service.generate(self._request, patient=patient, outlet=outlet, apart=apart)) as steps:
            async for step in steps:
                yield self._read(step, streaming=not patient)
        if self.ending is None:
            raise PagodaError("the engine ended this request without saying why")

    def plain(self, text: str, tokens: int) -> list[Change]:
        """What a text of so many tokens changes, with which nothing else came."""
        return self._reader.feed(text, tokens, False, self.count)

    async def whole(self) -> Ending:
        """Run to the end."""
        async with aclosing(self.changes(patient=True)) as changes:
            async for _ in changes:
                pass
        assert self.ending is not None
        return self.ending

    def _read(self, step: Step, streaming: bool) -> list[Change]:
        self.count.cached += step.cached_tokens
        changes: list[Change] = []
        for delta in step.deltas:
            reason = delta.finish_reason
            if reason == "abort":
                raise self._service.ended_early()
            new = self._reader.feed(delta.text, len(delta.token_ids), reason is not None, self.count)
            ends = self._request.eos_ids if reason == "stop" else ()  # which are no text
            entries = [entry for entry in delta.logprobs or () if entry.token_id not in ends]
            changes += self._with_logprobs(new, entries) if entries else new
            if reason is not None:
                if self._reader.seeks_calls:
                    self._service.metrics.read_tools(self._name, streaming=streaming, called=self._reader.called)
                stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
                self.ending = Ending("tool_calls" if reason == "stop" and self._reader.called else reason, stop)
        return changes

    def _with_logprobs(self, changes: list[Change], entries: Sequence[TokenLogprobs]) -> list[Change]:
        """Tokens belong to the text that grows with them, or next, where they are a part of a character; those of thoughts and calls to
        none."""
        self._unsaid += entries
        place = next((i for i, one in enumerate(changes) if isinstance(one, Grown) and one.block.kind == "text"), None)
        if changes and place is None:
            self._unsaid.clear()
        if place is None:
            return changes
        grown, told = changes[place], self._logprobs(self._unsaid)
        assert isinstance(grown, Grown)
        self._unsaid.clear()
        grown.block.logprobs += told
        return [*changes[:place], grown._replace(logprobs=told), *changes[place + 1 :]]
