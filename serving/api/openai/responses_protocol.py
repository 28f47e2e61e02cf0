"""Requests of `/v1/responses` with `vllm serve`'s extra fields, and what of them is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import Int32, Name

Item = dict[str, Any]
Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)
]


class TextConfig(msgspec.Struct, kw_only=True):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much the model thinks. Summaries are not made: the thoughts themselves are shown."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class Extras(msgspec.Struct, kw_only=True):
    """Fields that mean what they mean in chat."""

    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Name | Annotated[list[Name], msgspec.Meta(max_length=64)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    cache_salt: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseRequest(Extras, kw_only=True):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # declared so that they are refused by name
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    moderation: Any = None
    previous_input_messages: Any = None
    enable_response_messages: bool | None = None
    # accepted and without effect
    max_tool_calls: Any = None
    stream_options: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    context_management: Any = None


_REFUSED = ("conversation", "prompt", "top_logprobs", "moderation", "previous_input_messages", "enable_response_messages")
_WITHOUT_EFFECT = "reasoning.encrypted_content"
"""What `include` may ask for: thoughts are sent in the clear, so that nothing is missing without it."""


def refuse_unsupported(body: ResponseRequest) -> None:
    """Raises `RequestError` naming the first field without which the answer would be another."""
    for name in _REFUSED:
        if getattr(body, name):
            raise _refused(name, name)
    if body.truncation == "auto":
        raise _refused("truncation", "truncation='auto'")
    for wanted in body.include or ():
        if wanted != _WITHOUT_EFFECT:
            raise _refused("include", f"include={wanted!r}")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _refused("text.verbosity", f"text.verbosity={body.text.verbosity!r}")
    if body.background and body.stream:
        raise _refused("stream", "stream=true together with background=true")


def _refused(param: str, what: str) -> RequestError:
    return RequestError(f"{what} is not supported by this server; leave it out", param=param, code="unsupported_parameter")
