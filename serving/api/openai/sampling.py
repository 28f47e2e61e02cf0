"""From request fields to `EngineRequest`: sampling settings, length limits, truncation, checks against the vocabulary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from pagoda.serving.api.service import Service, engine_id
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.bad_words import with_bad_word_ids
from pagoda.serving.frontend.processor import check_ids, output_limit

MAX_BIAS = 100.0
"""The protocol's range of `logit_bias`; values beyond mean the same."""

_SAME_NAME = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def given_settings(request: GenerationRequest) -> dict[str, Any]:
    """The settings that the request brings, under `SamplingParams`' names."""
    out = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if bias := out.get("logit_bias"):
        out["logit_bias"] = {token: max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in bias.items()}
    if request.vllm_xargs:
        out["extra"] = request.vllm_xargs
    return out


def completion_settings(request: CompletionRequest) -> dict[str, Any]:
    """Settings of a completions request: `echo` with `max_tokens=0` scores the prompt, `best_of` needs logprobs to choose by."""
    out = {"max_tokens": 16, **given_settings(request)}
    if request.logprobs is not None:
        out["logprobs"] = request.logprobs
        if request.echo:
            out.setdefault("prompt_logprobs", request.logprobs)
    if request.echo and request.max_tokens == 0:
        out["max_tokens"] = 1
    if request.best_of is not None:
        _check_best_of(request)
        out["n"] = request.best_of
        out.setdefault("logprobs", 0)
    return out


def chat_settings(request: ChatRequest) -> dict[str, Any]:
    """Settings of a chat request: `max_completion_tokens` is the newer name, logprobs are a switch and a count."""
    out = given_settings(request)
    if request.max_completion_tokens is not None:
        out["max_tokens"] = request.max_completion_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.logprobs:
        out["logprobs"] = request.top_logprobs or 0
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of is a field of completions, not of chat; use n", param="best_of")
    return out


def _check_best_of(request: CompletionRequest) -> None:
    best_of, n = request.best_of or 1, request.n or 1
    if best_of < n:
        raise RequestError(f"best_of={best_of} must be at least n={n}", param="best_of")
    if best_of > n and request.stream:
        raise RequestError("best_of above n cannot be streamed: which choice is best is known at the end", param="best_of")


def engine_request(
    service: Service, request: GenerationRequest, settings: dict[str, Any], prompt: Sequence[int], reply_id: str
) -> EngineRequest:
    """A checked request for the engine. Raises `RequestError` for what can never be answered."""
    tokenizer, facts = service.text.tokenizer, service.client.facts
    prompt = truncated(prompt, request, facts.max_model_len, settings.get("max_tokens"))
    limit = output_limit(len(prompt), settings.get("max_tokens"), facts.max_model_len)
    if "max_tokens" not in settings:
        limit = min(limit, service.card.sampling_defaults.get("max_tokens", limit))
    params = with_bad_word_ids(_params({**service.card.sampling_defaults, **settings, "max_tokens": limit}), tokenizer)
    check_ids("prompt", prompt, facts.vocab_size)
    check_ids("stop_token_ids", params.stop_token_ids, facts.vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids, facts.vocab_size)
    check_ids("logit_bias", list(params.logit_bias), facts.vocab_size)
    return EngineRequest(
        request_id=engine_id(reply_id),
        prompt=tuple(prompt),
        params=params,
        eos_ids=tokenizer.eos_ids,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        beam_width=_beam_width(request, params),
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        arrival=time.time(),
    )


def _params(settings: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(**settings)
    if params.seed is None:
        return params
    return replace(params, seed=params.seed & (2**63 - 1))


def _beam_width(request: GenerationRequest, params: SamplingParams) -> int:
    if not request.use_beam_search:
        return 0
    if request.stream:
        raise RequestError("beam search cannot be streamed: the beams are ranked at the end", param="use_beam_search")
    return params.n


def truncated(prompt: Sequence[int], request: GenerationRequest, longest: int, max_tokens: int | None) -> Sequence[int]:
    """The prompt cut to `truncate_prompt_tokens` (−1: what leaves room for the answer) at the side that was asked for."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(1, longest - (max_tokens or 1))
    if not 1 <= keep <= longest:
        raise RequestError(
            f"truncate_prompt_tokens={keep} is out of range: it must be -1 or from 1 to {longest}", param="truncate_prompt_tokens"
        )
    if request.truncation_side not in (None, "left", "right"):
        raise RequestError(f"truncation_side={request.truncation_side!r} must be left or right", param="truncation_side")
    return prompt[:keep] if request.truncation_side == "right" else prompt[-keep:]
