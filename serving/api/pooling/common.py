"""What the endpoints of pooling models share: from a body to engine requests, and all answers of a reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.hal.errors import RequestError
from pagoda.serving.api.live_names import engine_id, new_id
from pagoda.serving.api.openai.messages import chat_prompt
from pagoda.serving.api.pooling.protocol import InputFields, PoolingFields, PoolingUsage
from pagoda.serving.api.service import Service
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.pooling import PoolingParams
from pagoda.serving.frontend.pooled import PooledPrompts
from pagoda.serving.frontend.pooled_outputs import numbers

Numbers = NDArray[np.float32]


class Head(NamedTuple):
    """What every reply begins with."""

    id: str
    created: int
    model: str


class Answers(NamedTuple):
    """Of one reply's requests, in order."""

    values: list[Numbers]
    usage: PoolingUsage


def open_for(service: Service, body: PoolingFields, prefix: str, given: str | None) -> Head:
    """Checks that the server is open, that the model is the one, and that it pools."""
    service.check_open()
    model = service.check_model(body.model)
    prompts_of(service).pooling  # noqa: B018  raises where the model generates
    return Head(new_id(prefix, body.request_id or given), int(time.time()), model)


def prompts_of(service: Service) -> PooledPrompts:
    return PooledPrompts(service.text, service.client.facts)


def active(*given: bool | None) -> bool | None:
    """The first of the names of `use_activation` that a request brings."""
    return next((value for value in given if value is not None), None)


async def input_requests(service: Service, body: InputFields, params: PoolingParams, head: Head) -> list[EngineRequest]:
    """A request for each prompt of `input`, or for the conversation."""
    maker = prompts_of(service)
    ids = [(await chat_prompt(service, body)).ids] if body.messages is not None else await _input_ids(service, body, maker)  # type: ignore[arg-type]
    cut = [maker.truncated(one, body.truncate_prompt_tokens, body.truncation_side) for one in ids]
    return [request_of(service, maker, one, params, body, head.id) for one in cut]


def request_of(
    service: Service, maker: PooledPrompts, ids: Sequence[int], params: PoolingParams, body: PoolingFields, name: str
) -> EngineRequest:
    """One request with the body's common fields."""
    adapter = service.adapter_of(body.model)
    fields: dict[str, Any] = {"priority": body.priority or 0, "cache_salt": body.cache_salt, "adapter": adapter}
    return maker.request(ids, params, request_id=engine_id(name), **fields)


async def _input_ids(service: Service, body: InputFields, maker: PooledPrompts) -> list[list[int]]:
    given = body.input
    if given is None:
        raise RequestError("input is missing; it is required, or messages", param="input", code="missing_field")
    many: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    if len({type(one) for one in many}) > 1 or (isinstance(many[0], list) and not all(isinstance(i, int) for one in many for i in one)):
        raise RequestError("input mixes token ids with texts; send one kind", param="input")
    if len(many) > service.config.max_prompts:
        raise RequestError(
            f"input holds {len(many)} prompts, the limit is {service.config.max_prompts}; the server's flag is --max-prompts", param="input"
        )
    special = body.add_special_tokens is not False
    if body.truncate_prompt_tokens is None:
        service.check_size(max((len(one) for one in many if isinstance(one, str)), default=0))
    size = sum(len(one) for one in many if isinstance(one, str))
    return await service.off_loop(size, lambda: [maker.ids(one, special) for one in many])


async def answers_of(service: Service, requests: Sequence[EngineRequest]) -> Answers:
    """All answers, made at the same time; one failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.pool(request)) for request in requests]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    read = sum(len(request.prompt) for request in requests)
    return Answers([numbers(task.result()) for task in tasks], PoolingUsage(prompt_tokens=read, total_tokens=read))
