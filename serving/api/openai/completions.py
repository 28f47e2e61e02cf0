"""`POST /v1/completions`."""

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
from pagoda.serving.api.openai.collect import Answer, Answers, UsageCount, collect, usage_of
from pagoda.serving.api.openai.common import StreamUsage, as_token_ids, prompt_text, request_id, stream_usage
from pagoda.serving.api.openai.logprobs import CompletionLogprobsBuilder, TokenNames, joined, prompt_logprobs
from pagoda.serving.api.openai.prompts import prompts_of
from pagoda.serving.api.openai.protocol import CompletionRequest
from pagoda.serving.api.openai.replies import Completion, CompletionChoice, CompletionLogprobs
from pagoda.serving.api.openai.sampling import completion_settings, engine_request
from pagoda.serving.api.openai.unsupported import refuse_unsupported
from pagoda.serving.api.outlet import MARK, Event, Outlet, around
from pagoda.serving.api.service import Service, Step
from pagoda.serving.api.stream import EventStream, JsonReply, merged
from pagoda.serving.api.stream_events import event
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.frontend.text_deltas import TextDelta
from starlette.requests import Request
from starlette.responses import Response


class Completions:
    """The endpoint."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, CompletionRequest)
        refuse_unsupported(body)
        usage = stream_usage(body, self._service.config)
        model = self._service.check_model(body.model)
        settings = completion_settings(body)
        prompts = await prompts_of(self._service, body, settings.get("max_tokens"))
        reply_id = new_id("cmpl", body.request_id or request_id(request))
        requests = [engine_request(self._service, body, settings, ids, reply_id) for ids in prompts]
        names = TokenNames(self._service.text.tokenizer, as_token_ids(body, self._service.config))
        reply = CompletionReply(self._service, body, model, reply_id, requests, names)
        if not body.stream:
            return JsonReply(reply.whole())
        outlet = Outlet() if len(requests) == 1 else None
        return EventStream(reply.stream(usage, outlet), outlet=outlet, keep_alive=self._service.config.sse_keep_alive_interval)


@dataclass
class CompletionReply:
    """One reply in the making."""

    service: Service
    body: CompletionRequest
    model: str
    reply_id: str
    requests: list[EngineRequest]
    names: TokenNames
    created: int = field(default_factory=lambda: int(time.time()))
    _builders: dict[int, CompletionLogprobsBuilder] = field(default_factory=dict)

    @property
    def _scores_only(self) -> bool:
        return bool(self.body.echo) and self.body.max_tokens == 0

    async def whole(self) -> Completion:
        answers = await collect(self.service, self.requests)
        n = self.body.n or 1
        choices = [
            self._whole_choice(place * n + rank, group, answer)
            for place, group in enumerate(answers)
            for rank, answer in enumerate(group.best(n))
        ]
        return self._reply(choices, usage_of(answers, completion=not self._scores_only))

    async def stream(self, wants: StreamUsage, outlet: Outlet | None = None) -> AsyncGenerator[bytes, None]:
        count = UsageCount(self.requests, completion=not self._scores_only)
        if outlet is not None:
            outlet.event = self._plain_events(wants, count)
            outlet.several = partial(self._several, wants, count) if self.requests[0].params.n > 1 else None
        asked = [self.service.generate(request, interval=self.body.stream_interval, outlet=outlet) for request in self.requests]
        if len(asked) == 1:  # what most are; a generator less in their way
            async with aclosing(asked[0]) as only:
                async for step in only:
                    if events := self._events(0, step, wants, count):
                        yield events
        else:
            async with aclosing(merged(asked)) as steps:
                async for place, step in steps:
                    if events := self._events(place, step, wants, count):
                        yield events
        if wants.final:
            yield event(self._reply([], count.usage()))

    def _plain_events(self, wants: StreamUsage, count: UsageCount) -> Event:
        if not (wants.continuous or self.body.return_token_ids):
            return around(event(self._reply([CompletionChoice(index=0, text=MARK)], UNSET)), count.add_plain)

        def events(text: str, token_ids: Sequence[int]) -> bytes:
            count.add_plain(len(token_ids))
            delta = TextDelta(0, text, tuple(token_ids))
            return self._chunk(0, Step([delta]), delta, count.usage() if wants.continuous else UNSET)

        return events

    def _several(self, wants: StreamUsage, count: UsageCount, deltas: Sequence[TextDelta]) -> bytes:
        return self._events(0, Step([*deltas]), wants, count)

    def _events(self, place: int, step: Step, wants: StreamUsage, count: UsageCount) -> bytes:
        count.add(step)
        usage: Any = count.usage() if wants.continuous else UNSET
        return b"".join(self._chunk(place, step, delta, usage) for delta in step.deltas)

    def _chunk(self, place: int, step: Step, delta: TextDelta, usage: Any) -> bytes:
        choice = self._chunk_choice(place, step, delta)
        return event(self._reply([choice], usage)) if choice is not None else b""

    def _reply(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        return Completion(id=self.reply_id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _whole_choice(self, index: int, group: Answers, answer: Answer) -> CompletionChoice:
        if self._scores_only:
            answer = Answer(answer.index, finish_reason="length")
        echo = self._echo(group.request) if self.body.echo else ""
        logprobs = self._logprobs(index, group.request, answer.logprobs, group.prompt_logprobs if self.body.echo else None)
        return CompletionChoice(
            index=index,
            text=echo + answer.text,
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self.body.return_token_ids else UNSET,
            prompt_token_ids=_spoken(group.request) if self.body.return_token_ids else UNSET,
            prompt_text=prompt_text(self.body, self.service.text.tokenizer, _spoken(group.request)),
            prompt_logprobs=prompt_logprobs(self.names, group.prompt_logprobs) if self.body.prompt_logprobs is not None else UNSET,
        )

    def _chunk_choice(self, place: int, step: Step, delta: TextDelta) -> CompletionChoice | None:
        request = self.requests[place]
        index = place * request.params.n + delta.index
        first = index not in self._builders
        if self._scores_only:
            delta = TextDelta(delta.index, "", (), (), "length")
        echo = self._echo(request) if self.body.echo and first else ""
        prompt_entries = (step.prompt_logprobs or ()) if self.body.echo and first else None
        logprobs = self._logprobs(index, request, delta.logprobs or (), prompt_entries)
        if not (first or delta.text or delta.finish_reason or logprobs or self.body.return_token_ids):
            return None
        return CompletionChoice(
            index=index,
            text=echo + delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.body.return_token_ids else UNSET,
            prompt_token_ids=_spoken(request) if self.body.return_token_ids and first else UNSET,
            prompt_text=prompt_text(self.body, self.service.text.tokenizer, _spoken(request)) if first else UNSET,
            prompt_logprobs=self._chunk_prompt_logprobs(step, first),
        )

    def _chunk_prompt_logprobs(self, step: Step, first: bool) -> Any:
        if self.body.prompt_logprobs is None or not first:
            return UNSET
        return prompt_logprobs(self.names, step.prompt_logprobs or ())

    def _logprobs(
        self, index: int, request: EngineRequest, entries: Any, prompt: tuple[TokenLogprobs, ...] | None
    ) -> CompletionLogprobs | None:
        builder = self._builders.get(index)
        if builder is None:
            builder = self._builders[index] = CompletionLogprobsBuilder(self.names, self.body.logprobs or 0)
        if self.body.logprobs is None:
            return None
        out = builder.add_prompt(request.prompt, prompt) if prompt is not None else CompletionLogprobs()
        return joined(out, builder.add(entries))

    def _echo(self, request: EngineRequest) -> str:
        if isinstance(self.body.prompt, str) and self.body.truncate_prompt_tokens is None:
            return self.body.prompt
        return self.service.text.tokenizer.decode(request.prompt, skip_special_tokens=request.params.skip_special_tokens)


def _spoken(request: EngineRequest) -> tuple[int, ...]:
    """The prompt's tokens; those of embeddings are none."""
    return request.prompt if request.spoken else ()
