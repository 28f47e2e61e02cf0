"""One response in the making, whole or as a stream of numbered events."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from pagoda.serving.api.blocks import Answering, Block, Change, Closed, Grown, Opened
from pagoda.serving.api.openai.responses_replies import (
    Incomplete,
    ResponseRecord,
    ending_event,
    failure_of,
    item_id_for,
    item_of,
    part_of,
    usage_of,
)
from pagoda.serving.api.outlet import Outlet
from pagoda.serving.api.stream import log_internal
from pagoda.serving.api.stream_events import named_event

Event = dict[str, Any]


async def _nothing() -> None: ...


@dataclass
class ResponseRun:
    """Fills `record` from what the model answers; `on_end` is called when it is whole, before the client hears of it, `on_start` when
    one in the background begins, `tell` with the events of one that streams there, and with whether these are the last."""

    record: ResponseRecord
    answering: Answering
    on_end: Callable[[], Awaitable[None]] = _nothing
    on_start: Callable[[], Awaitable[None]] = _nothing
    tell: Callable[[list[bytes], bool], None] | None = None
    _ids: dict[int, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def whole(self) -> ResponseRecord:
        """Run to the end."""
        await self.answering.whole()
        self._complete()
        await self.on_end()
        return self.record

    async def stream(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        """Encoded events. An error before the first one is raised, a later one is told as the last event."""
        begun, outlet.event = False, self._plain_events
        try:
            async with aclosing(self.answering.changes(outlet=outlet)) as steps:
                async for changes in steps:
                    events = [] if begun else [*self._opening()]
                    begun = True
                    events += [event for change in changes for event in self._events(change)]
                    if events:
                        yield b"".join(map(self._encoded, events))
        except Exception as error:
            if not begun:
                raise
            self._fail(error)
        else:
            self._complete()
        await self.on_end()
        yield ending_event(self.record, next(self._numbers))

    def _plain_events(self, text: str, token_ids: Sequence[int]) -> bytes:
        changes = self.answering.plain(text, len(token_ids))
        return b"".join(self._encoded(event) for change in changes for event in self._events(change))

    async def in_background(self) -> None:
        """Run to the end, whatever that is; cancelling it is one of them."""
        self._tell({"type": "response.created", "response": self.record}, {"type": "response.queued", "response": self.record})
        try:
            async with aclosing(self.answering.changes(patient=self.tell is None)) as steps:
                async for changes in steps:
                    if self.record.status == "queued":
                        self.record.status = "in_progress"
                        await self.on_start()
                        self._tell({"type": "response.in_progress", "response": self.record})
                    if self.tell is not None:
                        self._tell(*(event for change in changes for event in self._events(change)))
        except asyncio.CancelledError:
            self.record.status = "cancelled"
            self._take_output()
        except Exception as error:
            self._fail(error)
        else:
            self._complete()
        await self.on_end()
        if self.tell is not None:
            self.tell([ending_event(self.record, next(self._numbers))], True)

    def _tell(self, *events: Event) -> None:
        if self.tell is not None and events:
            self.tell([*map(self._encoded, events)], False)

    def _fail(self, error: Exception) -> None:
        log_internal(error)
        self.record.status, self.record.error = "failed", failure_of(error)
        self._take_output()

    def _complete(self) -> None:
        if self._cut:
            self.record.status, self.record.incomplete_details = "incomplete", Incomplete("max_output_tokens")
        else:
            self.record.status, self.record.completed_at = "completed", int(time.time())
        self._take_output()

    def _take_output(self) -> None:
        self.record.output = [self._item(block) for block in self.answering.blocks]
        self.record.usage = usage_of(self.answering.count)

    @property
    def _cut(self) -> bool:
        return self.answering.ending is not None and self.answering.ending.reason == "length"

    def _id(self, block: Block) -> str:
        return self._ids.setdefault(block.index, item_id_for(block))

    def _item(self, block: Block) -> dict[str, Any]:
        last = block is self.answering.blocks[-1]
        status: Literal["completed", "incomplete"] = "incomplete" if not block.ended or (last and self._cut) else "completed"
        return item_of(block, self._id(block), status)

    def _encoded(self, event: Event) -> bytes:
        return named_event(event["type"], event | {"sequence_number": next(self._numbers)})

    def _opening(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self.record}
        yield {"type": "response.in_progress", "response": self.record}

    def _events(self, change: Change) -> Iterator[Event]:
        match change:
            case Opened(block):
                item = item_of(block, self._id(block), "in_progress")
                yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
                if block.kind != "call":
                    yield self._of_part(block, "response.content_part.added", part=part_of(block, ""))
            case Grown(block, text, logprobs):
                yield self._of_part(block, f"response.{_WORDS[block.kind]}.delta", logprobs, delta=text)
            case Closed(block):
                yield from self._closing(block)

    def _closing(self, block: Block) -> Iterator[Event]:
        done = f"response.{_WORDS[block.kind]}.done"
        if block.kind == "call":
            yield self._of_part(block, done, name=block.name, arguments=block.text)
        else:
            yield self._of_part(block, done, block.logprobs, text=block.text)
            yield self._of_part(block, "response.content_part.done", part=part_of(block, block.text))
        yield {"type": "response.output_item.done", "output_index": block.index, "item": self._item(block)}

    def _of_part(self, block: Block, kind: str, logprobs: Sequence[Any] = (), **fields: Any) -> Event:
        if block.kind != "call":
            fields["content_index"] = 0
        if block.kind == "text" and "part" not in fields:
            fields["logprobs"] = [*logprobs]
        return {"type": kind, "item_id": self._id(block), "output_index": block.index, **fields}


_WORDS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
