"""Requests of the OpenAI protocol with vLLM's extra fields, as typed records."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Texts that are identifiers, and stop strings and words to avoid, which are looked for at every token."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: a last chunk with usage; `continuous_usage_stats`: usage so far in every chunk."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that completions and chat share. None is the server's default everywhere."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: Name | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = False
    seed: int | None = None
    stop: Name | Annotated[list[Name], msgspec.Meta(max_length=64)] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[Name], msgspec.Meta(max_length=1024)] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_token_ids: bool | None = False
    return_prompt_text: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    thinking_token_budget: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    priority: Int32 | None = 0
    cache_salt: Name | None = None
    echo: bool | None = False
    vllm_xargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    repetition_detection: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # declared so that they are refused by name instead of being ignored: `unsupported.py`
    watermarking: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    logprob_token_ids: Any = None
    return_token_offsets: Any = None
    return_weight_versions: Any = None
    routed_experts_prompt_start: Any = None
    # accepted and without effect, as at OpenAI's other servers
    user: Any = None
    session_id: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`. A prompt is a text, a list of texts, token ids, or a list of lists of them; before
    these, rows of embeddings: base64 of a tensor that `torch.save` or safetensors wrote."""

    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = True
    suffix: str | None = None
    prompt_embeds: str | list[str] | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_special_tokens: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None
    mm_payload: Any = None
    media_io_kwargs: Any = None
    metadata: Any = None
    store: bool | None = False
    service_tier: Any = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    include_reasoning: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: `prompt`, or `messages` as in chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
