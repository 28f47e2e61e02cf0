"""`/v1/responses`: create, count, look up, follow, cancel, delete, and list what a response was given."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from pagoda.hal.errors import NotFoundError, RequestError
from pagoda.serving.api.blocks import Answering, BlockReader
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.openai.common import as_token_ids
from pagoda.serving.api.openai.logprobs import TokenNames, chat_logprobs
from pagoda.serving.api.openai.prepare import Question, chat_engine_request, question
from pagoda.serving.api.openai.protocol import ChatRequest
from pagoda.serving.api.openai.responses_fit import fitting
from pagoda.serving.api.openai.responses_items import items_of
from pagoda.serving.api.openai.responses_pages import page_of
from pagoda.serving.api.openai.responses_protocol import Item, ResponseRequest, refuse_unsupported
from pagoda.serving.api.openai.responses_replies import Deleted, InputTokens, ResponseRecord, new_record
from pagoda.serving.api.openai.responses_run import ResponseRun
from pagoda.serving.api.openai.responses_store import Stored
from pagoda.serving.api.openai.responses_translate import NAMES, chat_request
from pagoda.serving.api.openai.sampling import renamed
from pagoda.serving.api.outlet import Outlet
from pagoda.serving.api.scale_out import rendered_chat
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import EventStream, JsonReply
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from starlette.requests import Request
from starlette.responses import Response


class Responses:
    """The endpoints, and the responses that they keep."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies
        self._desk = service.desk
        self._enabled = service.config.max_stored_responses > 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._desk.on_cancel = self._end

    async def create(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, ResponseRequest)
        refuse_unsupported(body)
        model, owner, keep = self._service.check_model(body.model), _owner(request), self._keeps(body)
        given = (*await self._before(body, owner), *items_of(body.input))
        response_id = f"resp_{uuid.uuid4().hex}"  # never the request's own id, which clients may repeat
        try:
            chat, asked = await self._asked(body, given)
            engine = chat_engine_request(self._service, chat, asked, response_id)
        except RequestError as error:
            raise renamed(error, NAMES) from None
        record = new_record(body, response_id, model, engine.params, keep)
        run, stored = ResponseRun(record, self._answering(body, chat, asked, engine)), Stored(owner, record, given)
        if body.background:
            stored.streamed = bool(body.stream)
            begun = await self._start(run, stored)
            return self._events(self._following(owner, response_id, 0)) if body.stream else _json(begun)
        if keep:
            run.on_end = partial(self._desk.keep, stored)
        if not body.stream:
            return JsonReply(run.whole())
        outlet = Outlet()
        return self._events(run.stream(outlet), outlet)

    async def count(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, ResponseRequest)
        refuse_unsupported(body)
        self._service.check_model(body.model)
        given = (*await self._before(body, _owner(request)), *items_of(body.input))
        try:
            _, asked = await self._asked(body, given)
        except RequestError as error:
            raise renamed(error, NAMES) from None
        return _json(InputTokens(input_tokens=len(asked.prompt)))

    async def render(self, request: Request) -> Response:
        body = await self._bodies.read(request, ResponseRequest)
        refuse_unsupported(body)
        model, given = self._service.check_model(body.model), (*await self._before(body, _owner(request)), *items_of(body.input))
        try:
            chat, asked = await self._asked(body, given)
            chat.stream = body.stream
            return rendered_chat(self._service, chat, model, asked)
        except RequestError as error:
            raise renamed(error, NAMES) from None

    async def get(self, request: Request) -> Response:
        stored = await self._desk.find(*_named(request))
        if request.query_params.get("stream") != "true":
            return _json(stored.record)
        if not stored.streamed:
            raise RequestError("only a response made with stream=true and background=true can be streamed again", param="stream")
        after = request.query_params.get("starting_after", "")
        if after and not after.isdecimal():
            raise RequestError(f"starting_after={after[:20]!r} must be the number of an event", param="starting_after")
        return self._events(self._following(*_named(request), int(after) + 1 if after else 0))

    async def delete(self, request: Request) -> Response:
        return _json(Deleted(id=(await self._desk.forget(*_named(request))).record.id))

    async def cancel(self, request: Request) -> Response:
        return _json(await self._desk.cancel(*_named(request)))

    async def input_items(self, request: Request) -> Response:
        return _json(page_of((await self._desk.find(*_named(request))).given, request.query_params))

    async def _asked(self, body: ResponseRequest, items: Sequence[Item]) -> tuple[ChatRequest, Question]:
        """With `truncation` `auto`, of as many of the last items as leave room for the answer."""
        longest = self._service.client.facts.max_model_len - (body.max_output_tokens or 1)

        async def fits(some: Sequence[Item]) -> bool:
            return len((await question(self._service, chat_request(body, some))).prompt) <= longest

        if body.truncation == "auto" and len(items) > 1:
            items = await fitting(items, fits)
        chat = chat_request(body, items)
        return chat, await question(self._service, chat)

    async def _following(self, owner: str, response_id: str, place: int) -> AsyncGenerator[bytes, None]:
        while True:
            told = await self._desk.follow(owner, response_id, place)
            yield b"".join(told.events)
            place += len(told.events)
            if told.ended:
                return

    def _events(self, events: AsyncGenerator[bytes, None], outlet: Outlet | None = None) -> EventStream:
        return EventStream(events, b"", outlet, keep_alive=self._service.config.sse_keep_alive_interval)

    async def _start(self, run: ResponseRun, stored: Stored) -> ResponseRecord:
        run.record.status, stored.background, stored.running = "queued", True, True
        if stored.streamed:
            run.tell = partial(self._desk.tell, run.record.id)
        run.on_start, run.on_end = partial(self._desk.renew, stored), partial(self._ended, stored)
        await self._desk.keep(stored)
        self._tasks[run.record.id] = asyncio.ensure_future(run.in_background())
        return run.record

    async def _ended(self, stored: Stored) -> None:
        self._tasks.pop(stored.record.id, None)
        stored.running = False
        await self._desk.renew(stored)

    def _end(self, response_id: str) -> None:
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()

    def _keeps(self, body: ResponseRequest) -> bool:
        wanted = "store" if body.store else "background" if body.background else None
        if body.background and body.store is False:
            raise RequestError("background=true needs store=true: the response is looked up later", param="background")
        if wanted and not self._enabled:
            raise RequestError(f"{wanted}=true is not possible: the server keeps none (--max-stored-responses 0)", param=wanted)
        return self._enabled and body.store is not False

    async def _before(self, body: ResponseRequest, owner: str) -> tuple[Item, ...]:
        if body.previous_response_id is None:
            return ()
        try:
            stored = await self._desk.find(owner, body.previous_response_id)
        except NotFoundError as error:
            raise NotFoundError(str(error), param="previous_response_id", code="previous_response_not_found") from None
        if stored.running:
            raise RequestError("previous_response_id names a response that is still being made", param="previous_response_id")
        return stored.context

    def _answering(self, body: ResponseRequest, chat: ChatRequest, asked: Question, engine: EngineRequest) -> Answering:
        shown, parallel = body.include_reasoning is not False, chat.parallel_tool_calls is not False
        reader = BlockReader(asked.answers, asked.context, reasoning=shown, parallel=parallel)
        names = TokenNames(self._service.text.tokenizer, as_token_ids(chat, self._service.config))

        def logprobs(entries: Sequence[TokenLogprobs]) -> list[Any]:
            return chat_logprobs(names, entries, body.top_logprobs or 0).content

        return Answering(self._service, engine, reader, logprobs, "responses")


def _owner(request: Request) -> str:
    return str(request.scope.get("state", {}).get("key", ""))


def _named(request: Request) -> tuple[str, str]:
    return _owner(request), request.path_params["response_id"]


def _json(record: Any) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")
