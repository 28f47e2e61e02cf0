"""Token ids in, token ids out: `POST /inference/v1/generate`, and `/render`, which makes its requests of texts and conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pagoda.hal.errors import RequestError
from pagoda.serving.api.body import BodyReader
from pagoda.serving.api.live_names import new_id
from pagoda.serving.api.openai.collect import UsageCount, collect, usage_of
from pagoda.serving.api.openai.common import request_id
from pagoda.serving.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pagoda.serving.api.openai.prepare import Question, chat_settings_of, question
from pagoda.serving.api.openai.prompts import prompt_ids
from pagoda.serving.api.openai.protocol import ChatRequest, CompletionRequest, Int32, Name
from pagoda.serving.api.openai.replies import ChatLogprobs, Usage
from pagoda.serving.api.openai.sampling import completion_settings, engine_request
from pagoda.serving.api.openai.unsupported import refuse_unsupported
from pagoda.serving.api.service import Service
from pagoda.serving.api.stream import EventStream, JsonReply
from pagoda.serving.api.stream_events import event
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.engine.structured import StructuredOutputsParams
from starlette.requests import Request
from starlette.responses import Response


class GenerateRequest(msgspec.Struct, kw_only=True):
    """`sampling_params` are settings under the names of `/v1/completions`."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    model: str | None = None
    request_id: Name | None = None
    stream: bool | None = False
    cache_salt: Name | None = None
    priority: Int32 | None = 0
    features: Any = None
    kv_transfer_params: Any = None


class Choice(msgspec.Struct, kw_only=True):
    index: int
    token_ids: tuple[int, ...]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Reply(msgspec.Struct, kw_only=True):
    """Reply and chunk; `usage` of a chunk is that so far."""

    request_id: str
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType | None = UNSET


class ScaleOut:
    """The endpoints."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._service, self._bodies = service, bodies
        self._names = TokenNames(service.text.tokenizer, True)

    async def generate(self, request: Request) -> Response:
        self._service.check_open()
        body = await self._bodies.read(request, GenerateRequest)
        for name in ("features", "kv_transfer_params"):
            if getattr(body, name):
                raise RequestError(f"{name} is not supported by this server yet; leave it out", param=name, code="unsupported_parameter")
        self._service.check_model(body.model)
        reply_id = new_id("generate", body.request_id or request_id(request))
        made = self._engine_request(body, reply_id)
        if not body.stream:
            return JsonReply(self._whole(made, reply_id))
        return EventStream(self._stream(made, reply_id), keep_alive=self._service.config.sse_keep_alive_interval)

    async def render_completion(self, request: Request) -> Response:
        body = await self._bodies.read(request, CompletionRequest)
        refuse_unsupported(body)
        model, settings = self._service.check_model(body.model), completion_settings(body)
        return _json([rendered(body, model, ids, settings) for ids in await prompt_ids(self._service, body)])

    async def render_chat(self, request: Request) -> Response:
        body = await self._bodies.read(request, ChatRequest)
        refuse_unsupported(body)
        model, asked = self._service.check_model(body.model), await question(self._service, body)
        return rendered_chat(self._service, body, model, asked)

    def _engine_request(self, body: GenerateRequest, reply_id: str) -> EngineRequest:
        given = {"model": body.model, "priority": body.priority, "cache_salt": body.cache_salt, "stream": body.stream}
        completion = self._bodies.typed({**body.sampling_params, **given, "prompt": body.token_ids}, CompletionRequest)
        refuse_unsupported(completion)
        if not body.token_ids:
            raise RequestError("token_ids is empty; it needs at least one", param="token_ids")
        return engine_request(self._service, completion, completion_settings(completion), body.token_ids, reply_id)

    async def _whole(self, request: EngineRequest, reply_id: str) -> Reply:
        [group] = answers = await collect(self._service, [request])
        choices = [
            Choice(
                index=one.index,
                token_ids=one.token_ids,
                logprobs=self._logprobs(request, tuple(one.logprobs)),
                finish_reason=one.finish_reason,
            )
            for one in group.ordered()
        ]
        wanted = request.params.prompt_logprobs is not None
        prompt = prompt_logprobs(self._names, group.prompt_logprobs) if wanted else None
        return Reply(request_id=reply_id, choices=choices, usage=usage_of(answers), prompt_logprobs=prompt)

    async def _stream(self, request: EngineRequest, reply_id: str) -> AsyncGenerator[bytes, None]:
        count = UsageCount([request])
        async with aclosing(self._service.generate(request)) as steps:
            async for step in steps:
                count.add(step)
                choices = [
                    Choice(
                        index=one.index,
                        token_ids=one.token_ids,
                        logprobs=self._logprobs(request, one.logprobs or ()),
                        finish_reason=one.finish_reason,
                    )
                    for one in step.deltas
                ]
                told = step.prompt_logprobs
                prompt = prompt_logprobs(self._names, told) if told is not None else UNSET
                yield event(Reply(request_id=reply_id, choices=choices, usage=count.usage(), prompt_logprobs=prompt))

    def _logprobs(self, request: EngineRequest, entries: tuple[TokenLogprobs, ...]) -> ChatLogprobs | None:
        top = request.params.logprobs
        return None if top is None else chat_logprobs(self._names, entries, top)


def rendered_chat(service: Service, body: ChatRequest, model: str, asked: Question) -> Response:
    """The reply of `/render` to a chat, whatever protocol it came in."""
    return _json(rendered(body, model, asked.prompt, chat_settings_of(service, body, asked)))


def rendered(body: CompletionRequest | ChatRequest, model: str, ids: list[int], settings: dict[str, Any]) -> GenerateRequest:
    """What `generate` takes to answer the same."""
    given = {name: value for name, value in settings.items() if value is not None}
    if (structured := given.get("structured_outputs")) is not None:
        given["structured_outputs"] = _structure(structured)
    if body.thinking_token_budget is not None:
        given["thinking_token_budget"] = body.thinking_token_budget
    if extra := given.pop("extra", None):
        given["vllm_xargs"] = extra
    return GenerateRequest(
        token_ids=ids, sampling_params=given, model=model, stream=body.stream, cache_salt=body.cache_salt, priority=body.priority
    )


def _structure(asked: StructuredOutputsParams) -> dict[str, Any]:
    if asked.thinking is not None:
        raise RequestError("a request cannot be rendered whose answer has a form after reasoning; send it to chat", param=asked.origin)
    values = {one.name: getattr(asked, one.name) for one in fields(asked) if one.name not in ("origin", "thinking")}
    return {name: value for name, value in values.items() if value not in (None, False)}


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
