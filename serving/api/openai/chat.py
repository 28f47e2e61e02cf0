"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.live_names import new_id
from pagoda.serving.api.openai.answer_parts import AnswerParts
from pagoda.serving.api.openai.collect import Answer, UsageCount, collect, usage_of
from pagoda.serving.api.openai.common import StreamUsage, as_token_ids, prompt_text, request_id, stream_usage
from pagoda.serving.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pagoda.serving.api.openai.messages import content_text
from pagoda.serving.api.openai.prepare import chat_engine_request, question
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.openai.replies import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, Delta
from pagoda.serving.api.openai.unsupported import refuse_unsupported
from pagoda.serving.api.outlet import MARK, Event, Outlet, around
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import EventStream, JsonReply
from pagoda.serving.api.stream_events import event
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.frontend.parsers.answers import AnswerFormat
from pagoda.serving.frontend.parsers.events import Context
from pagoda.serving.frontend.text_deltas import TextDelta
from starlette.requests import Request
from starlette.responses import Response


class Chat:
    """The endpoint."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, ChatRequest)
        refuse_unsupported(body)
        usage = stream_usage(body, self._service.config)
        model = self._service.check_model(body.model)
        asked = await question(self._service, body)
        reply_id = new_id("chatcmpl", body.request_id or request_id(request))
        engine = chat_engine_request(self._service, body, asked, reply_id)
        names = TokenNames(self._service.text.tokenizer, as_token_ids(body, self._service.config))
        reply = ChatReply(self._service, body, model, reply_id, engine, names, asked.answers, asked.context)
        if not body.stream:
            return JsonReply(reply.whole())
        outlet = Outlet()
        return EventStream(reply.stream(usage, outlet), outlet=outlet, keep_alive=self._service.config.sse_keep_alive_interval)


@dataclass
class ChatReply:
    """One reply in the making."""

    service: Service
    body: ChatRequest
    model: str
    reply_id: str
    request: EngineRequest
    names: TokenNames
    answers: AnswerFormat
    context: Context
    created: int = field(default_factory=lambda: int(time.time()))
    _parts: dict[int, AnswerParts] = field(default_factory=dict)

    async def whole(self) -> ChatCompletion:
        (answers,) = groups = await collect(self.service, [self.request])
        return ChatCompletion(
            id=self.reply_id,
            created=self.created,
            model=self.model,
            choices=[self._choice(answer) for answer in answers.ordered()],
            usage=usage_of(groups),
            prompt_token_ids=self.request.prompt if self.body.return_token_ids else UNSET,
            prompt_text=self._prompt_text,
            prompt_logprobs=prompt_logprobs(self.names, answers.prompt_logprobs) if self.body.prompt_logprobs is not None else UNSET,
        )

    async def stream(self, wants: StreamUsage, outlet: Outlet | None = None) -> AsyncGenerator[bytes, None]:
        count = UsageCount([self.request])
        if outlet is not None:
            outlet.event = self._plain_events(wants, count)
            outlet.several = partial(self._several, wants, count) if self.request.params.n > 1 else None
        asked = self.service.generate(self.request, interval=self.body.stream_interval, outlet=outlet)
        async with aclosing(asked) as steps:
            async for step in steps:
                count.add(step)
                usage: Any = count.usage() if wants.continuous else UNSET
                if chunks := b"".join(event(chunk) for delta in step.deltas for chunk in self._chunks(delta, usage)):
                    yield chunks
        if wants.final:
            yield event(self._chunk([], count.usage()))

    def _plain_events(self, wants: StreamUsage, count: UsageCount) -> Event:
        parsed = self.answers.parser(self.context) is not None
        if not (parsed or wants.continuous or self.body.return_token_ids):
            return around(event(self._chunk([ChatChunkChoice(index=0, delta=Delta(content=MARK))], UNSET)), count.add_plain)

        def events(text: str, token_ids: Sequence[int]) -> bytes:
            count.add_plain(len(token_ids))
            usage: Any = count.usage() if wants.continuous else UNSET
            return b"".join(map(event, self._chunks(TextDelta(0, text, tuple(token_ids)), usage)))

        return events

    def _several(self, wants: StreamUsage, count: UsageCount, deltas: Sequence[TextDelta]) -> bytes:
        count.add_plain(sum(len(delta.token_ids) for delta in deltas))
        usage: Any = count.usage() if wants.continuous else UNSET
        return b"".join(event(chunk) for delta in deltas for chunk in self._chunks(delta, usage))

    def _choice(self, answer: Answer) -> ChatChoice:
        parts = self._new_parts()
        message = parts.message(self._role, self._echo, answer.text)
        self._count_read(parts, streaming=False)
        return ChatChoice(
            index=answer.index,
            message=message,
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=parts.finish_reason(answer.finish_reason),
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self.body.return_token_ids else UNSET,
        )

    def _chunks(self, delta: TextDelta, usage: Any) -> list[ChatChunk]:
        out = []
        if delta.index not in self._parts:
            out.append(self._opening(delta.index, usage))
        parts = self._parts[delta.index]
        added = parts.delta(delta.text, delta.finish_reason is not None)
        if delta.finish_reason is not None:
            self._count_read(parts, streaming=True)
        if not (added or delta.finish_reason or delta.logprobs or self.body.return_token_ids):
            return out
        choice = ChatChunkChoice(
            index=delta.index,
            delta=added or (Delta() if delta.finish_reason else Delta(content="")),
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=parts.finish_reason(delta.finish_reason),
            stop_reason=delta.stop_reason if delta.finish_reason else UNSET,
            token_ids=delta.token_ids if self.body.return_token_ids else UNSET,
        )
        return [*out, self._chunk([choice], usage)]

    def _opening(self, index: int, usage: Any) -> ChatChunk:
        first = not self._parts
        self._parts[index] = self._new_parts()
        chunk = self._chunk([ChatChunkChoice(index=index, delta=Delta(role=self._role, content=self._echo))], usage)
        if first:
            chunk.prompt_token_ids = self.request.prompt if self.body.return_token_ids else UNSET
            chunk.prompt_text = self._prompt_text
        return chunk

    def _new_parts(self) -> AnswerParts:
        return AnswerParts(
            self.answers.parser(self.context),
            self.answers.call_id,
            reasoning=self.body.include_reasoning is not False,
            parallel=self.body.parallel_tool_calls is not False,
        )

    def _count_read(self, parts: AnswerParts, *, streaming: bool) -> None:
        if self.answers.tools and self.context.tools:
            self.service.metrics.read_tools("chat_completions", streaming=streaming, called=parts.called)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Any) -> ChatChunk:
        return ChatChunk(id=self.reply_id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _logprobs(self, entries: Any) -> ChatLogprobs | None:
        entries_: tuple[TokenLogprobs, ...] | list[TokenLogprobs] = entries or ()
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.names, entries_, self.body.top_logprobs or 0)

    @property
    def _prompt_text(self) -> Any:
        return prompt_text(self.body, self.service.text.tokenizer, self.request.prompt)

    @property
    def _role(self) -> str:
        if self.body.continue_final_message:
            return str(self.body.messages[-1]["role"])
        return self.service.config.response_role

    @property
    def _echo(self) -> str:
        """With `echo`, the last message when the answer is by the same role and goes on from it."""
        last = self.body.messages[-1]
        if not self.body.echo or last.get("role") != self._role:
            return ""
        return content_text(last)
