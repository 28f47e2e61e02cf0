"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.anthropic.protocol import CountRequest, MessagesRequest
from pagoda.serving.api.anthropic.replies import (
    Message,
    StreamEvent,
    TokenCount,
    block_of,
    empty_block,
    signature,
    stop_of,
    usage_of,
)
from pagoda.serving.api.anthropic.translate import chat_request
from pagoda.serving.api.blocks import Answering, Block, BlockReader, Change, Closed, Grown, Opened
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.openai.prepare import Question, chat_engine_request, question
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.outlet import Outlet
from pagoda.serving.api.scale_out import rendered_chat
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import EventStream, JsonReply
from pagoda.serving.api.stream_events import named_event
from pagoda.serving.frontend.structured.answers import bounded
from starlette.requests import Request
from starlette.responses import Response

OLDEST = "2023-06-01"
"""Versions are dates; before this one streams were others."""


class Messages:
    """Both endpoints."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        _check_version(request)
        body = await self._bodies.read(request, MessagesRequest)
        model = self._service.check_model(body.model)
        chat, asked, clipped = await self._asked(body)
        reply_id = f"msg_{request.state.request_id}"
        engine = chat_engine_request(self._service, chat, asked, reply_id)
        thinking = body.thinking
        shown = not thinking or thinking.type != "disabled"
        reader = BlockReader(asked.answers, asked.context, reasoning=shown, parallel=chat.parallel_tool_calls is not False)
        hidden = thinking is not None and thinking.display == "omitted"
        reply = MessageReply(reply_id, model, Answering(self._service, engine, reader), clipped, hidden)
        if not body.stream:
            return JsonReply(reply.whole())
        outlet = Outlet()
        return EventStream(reply.stream(outlet), b"", outlet, keep_alive=self._service.config.sse_keep_alive_interval)

    async def render(self, request: Request) -> Response:
        _check_version(request)
        body = await self._bodies.read(request, MessagesRequest)
        model = self._service.check_model(body.model)
        chat, asked, _ = await self._asked(body)
        chat.stream = body.stream
        return rendered_chat(self._service, chat, model, asked)

    async def _asked(self, body: MessagesRequest) -> tuple[ChatRequest, Question, bool]:
        """The chat that it is, with thoughts bounded; and whether its answer had to be clipped to the room there is."""
        chat = chat_request(body)
        asked = await question(self._service, chat)
        chat.thinking_token_budget = _budget(body, asked)
        room = self._service.client.facts.max_model_len - len(asked.prompt)
        clipped = 0 < room < body.max_tokens
        if clipped:
            chat.max_tokens = room
        return chat, asked, clipped

    async def count(self, request: Request) -> Response:
        _check_version(request)
        body = await self._bodies.read(request, CountRequest)
        self._service.check_model(body.model)
        return JsonReply(self._counted(body))

    async def _counted(self, body: CountRequest) -> TokenCount:
        return TokenCount(len((await question(self._service, chat_request(body))).prompt))


def _budget(body: MessagesRequest, asked: Question) -> int | None:
    """How much may be thought. Clients give a number to any model: one whose thoughts have no end that is known is not bounded by it."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled" or not bounded(asked.answers, asked.structure):
        return None
    return thinking.budget_tokens


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", OLDEST)
    if version < OLDEST:
        raise RequestError(f"the header anthropic-version is {version[:64]!r}; this server speaks {OLDEST} and later versions")


@dataclass
class MessageReply:
    """One reply in the making. `clipped`: the context leaves less than `max_tokens`. `hidden`: thoughts come without their text."""

    reply_id: str
    model: str
    answering: Answering
    clipped: bool
    hidden: bool

    async def whole(self) -> Message:
        reason, sequence = stop_of(await self.answering.whole(), self.clipped)
        message = self._message([block_of(block, self.hidden) for block in self.answering.blocks])
        message.stop_reason, message.stop_sequence = reason, sequence
        return message

    async def stream(self, outlet: Outlet) -> AsyncGenerator[bytes, None]:
        started, outlet.event = False, self._plain_events
        async with aclosing(self.answering.changes(outlet=outlet)) as steps:
            async for changes in steps:
                events = [] if started else [*self._opening()]
                started = True
                events += [event for change in changes for event in self._events(change)]
                if events:
                    yield b"".join(_encoded(event) for event in events)
        yield b"".join(_encoded(event) for event in self._ending())

    def _plain_events(self, text: str, token_ids: Sequence[int]) -> bytes:
        changes = self.answering.plain(text, len(token_ids))
        return b"".join(_encoded(event) for change in changes for event in self._events(change))

    def _message(self, content: list[dict[str, Any]]) -> Message:
        return Message(id=self.reply_id, model=self.model, content=content, usage=usage_of(self.answering.count))

    def _opening(self) -> Iterator[StreamEvent]:
        yield StreamEvent(type="message_start", message=self._message([]))
        yield StreamEvent(type="ping")

    def _events(self, change: Change) -> Iterator[StreamEvent]:
        match change:
            case Opened(block):
                yield StreamEvent(type="content_block_start", index=block.index, content_block=empty_block(block))
            case Grown(block, text):
                if not (self.hidden and block.kind == "reasoning"):
                    yield _delta(block, **_grown(block, text))
            case Closed(block):
                if block.kind == "reasoning":
                    yield _delta(block, type="signature_delta", signature=signature(block))
                yield StreamEvent(type="content_block_stop", index=block.index)

    def _ending(self) -> Iterator[StreamEvent]:
        assert self.answering.ending is not None
        reason, sequence = stop_of(self.answering.ending, self.clipped)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield StreamEvent(type="message_delta", delta=delta, usage=usage_of(self.answering.count))
        yield StreamEvent(type="message_stop")


def _grown(block: Block, text: str) -> dict[str, str]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _delta(block: Block, **delta: str) -> StreamEvent:
    return StreamEvent(type="content_block_delta", index=block.index, delta=delta)


def _encoded(event: StreamEvent) -> bytes:
    return named_event(event.type, event)
