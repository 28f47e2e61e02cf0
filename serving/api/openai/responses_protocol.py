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
    length_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[Name], msgspec.Meta(max_length=1024)] | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    vllm_xargs: dict[str, Any] | None = None


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
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    # declared so that they are refused by name
    conversation: Any = None
    prompt: Any = None
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

    @property
    def tells_logprobs(self) -> bool:
        """Of the answer's text."""
        return _LOGPROBS in (self.include or ())


_REFUSED = ("conversation", "prompt", "moderation", "previous_input_messages", "enable_response_messages")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset(
    (
        _LOGPROBS,
        "reasoning.encrypted_content",
        "message.input_image.image_url",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""What `include` may ask for. Thoughts and images are sent in the clear, and no tools of the server's own are called, so that nothing is
missing where there is nothing to include."""


def refuse_unsupported(body: ResponseRequest) -> None:
    """Raises `RequestError` naming the first field without which the answer would be another."""
    for name in _REFUSED:
        if getattr(body, name):
            raise _refused(name, name)
    for wanted in body.include or ():
        if wanted not in _INCLUDES:
            raise _refused("include", f"include={wanted!r}")


def _refused(param: str, what: str) -> RequestError:
    return RequestError(f"{what} is not supported by this server; leave it out", param=param, code="unsupported_parameter")
