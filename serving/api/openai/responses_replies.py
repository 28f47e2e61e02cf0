"""Replies of the Responses API."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pagoda.serving.api.blocks import Block, Count
from pagoda.serving.api.errors import answer_for, message_of
from pagoda.serving.api.openai.responses_items import new_item_id, text_part
from pagoda.serving.api.openai.responses_protocol import Item, ResponseRequest
from pagoda.serving.api.openai.responses_translate import tools_of
from pagoda.serving.api.stream_events import named_event
from pagoda.serving.engine.params import SamplingParams

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
TYPES = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
"""The item that each kind of block is."""


class InputDetails(msgspec.Struct):
    """Prompt tokens that the prefix cache had."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Generated tokens that were thought."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Failure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(msgspec.Struct):
    """Why a response is cut short."""

    reason: str


class ResponseRecord(msgspec.Struct, kw_only=True):
    """A response; it changes while it is made."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | UnsetType = UNSET
    status: Status
    background: bool
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    top_logprobs: int = 0
    truncation: str = "disabled"
    usage: Usage | UnsetType = UNSET
    metadata: dict[str, str]


class Deleted(msgspec.Struct, kw_only=True):
    """Reply to a deletion."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, kw_only=True):
    """Reply of `/v1/responses/input_tokens`."""

    object: str = "response.input_tokens"
    input_tokens: int


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: str = "list"
    data: list[Item]
    first_id: str
    last_id: str
    has_more: bool


def new_record(body: ResponseRequest, response_id: str, model: str, params: SamplingParams, store: bool) -> ResponseRecord:
    """A response that has just begun."""
    reasoning = body.reasoning
    return ResponseRecord(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
        store=store,
        temperature=params.temperature,
        text={"format": (body.text and body.text.format) or {"type": "text"}} | _verbosity(body),
        tool_choice=body.tool_choice or "auto",
        tools=tools_of(body),
        top_p=params.top_p,
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
    )


def ending_event(record: ResponseRecord, number: int) -> bytes:
    """The last event of a stream. The protocol has none for what was cancelled, which is a way to be incomplete."""
    kind = f"response.{'incomplete' if record.status == 'cancelled' else record.status}"
    return named_event(kind, {"type": kind, "response": record, "sequence_number": number})


def _verbosity(body: ResponseRequest) -> dict[str, Any]:
    return {"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {}


def usage_of(count: Count) -> Usage:
    return Usage(
        input_tokens=count.prompt,
        input_tokens_details=InputDetails(count.cached),
        output_tokens=count.generated,
        output_tokens_details=OutputDetails(count.reasoning),
        total_tokens=count.prompt + count.generated,
    )


def failure_of(error: BaseException) -> Failure:
    return Failure("rate_limit_exceeded" if answer_for(error).status == 429 else "server_error", message_of(error))


def part_of(block: Block, text: str) -> dict[str, Any]:
    """The part that a block of words or thoughts is."""
    return {"type": "reasoning_text", "text": text} if block.kind == "reasoning" else text_part(text, block.logprobs if text else ())


def item_of(block: Block, item_id: str, status: Literal["in_progress", "completed", "incomplete"]) -> Item:
    """The item that a block is; while in progress, without its text."""
    text = "" if status == "in_progress" else block.text
    whole = {"id": item_id, "type": TYPES[block.kind], "status": status}
    if block.kind == "call":
        return {**whole, "call_id": block.call_id, "name": block.name, "arguments": text}
    content = [] if status == "in_progress" else [part_of(block, text)]
    if block.kind == "reasoning":
        return {**whole, "summary": [], "content": content}
    return {**whole, "role": "assistant", "content": content}


def item_id_for(block: Block) -> str:
    return new_item_id(TYPES[block.kind])
