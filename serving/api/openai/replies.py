"""Replies of the OpenAI protocol. Fields that default to UNSET are left out unless a request asked for them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

FINGERPRINT = "pagoda-0.1.0"


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens that the prefix cache saved."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a reply, all its prompts and choices together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class CompletionLogprobs(msgspec.Struct):
    """One entry a token in each list; the first token of a prompt has none."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Reply and chunk of `/v1/completions`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = FINGERPRINT


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    """A token of a chat reply."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a chat reply."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A tool call's name and arguments (JSON text), or what a chunk adds to them."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call of an answer."""

    id: str
    type: str = "function"
    function: CalledFunction


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to tool call `index`; id, type and name come with its first chunk."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer. Reasoning has both names that clients know."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Reply of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = FINGERPRINT
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    prompt_logprobs: list[dict[int, Any] | None] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A chunk of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """Chunk of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = FINGERPRINT
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ModelEntry(msgspec.Struct, kw_only=True):
    """A served model, or another name of it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pagoda"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Reply of `/v1/models`."""

    object: str = "list"
    data: list[ModelEntry]


class TokenizeReply(msgspec.Struct, kw_only=True):
    """Reply of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
