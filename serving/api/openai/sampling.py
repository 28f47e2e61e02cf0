"""From request fields to `EngineRequest`: settings under the engine's names, truncation; limits and ids are checked by `Processor`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.serving.api.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from pagoda.serving.api.openai.structured import structured_output
from pagoda.serving.api.service import Service
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import LogprobsMode, RepetitionDetection, SamplingParams
from pagoda.serving.engine.token_ids import check_prompt
from pagoda.serving.frontend.parsers.events import PROMPT_END
from pagoda.serving.frontend.processor import Encoded
from pagoda.serving.frontend.structured.answers import budgeted

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


_values = attrgetter(*_SAME_NAME)


def given_settings(request: GenerationRequest) -> dict[str, Any]:
    """The settings that the request brings, under `SamplingParams`' names."""
    out = {name: value for name, value in zip(_SAME_NAME, _values(request), strict=True) if value is not None}
    if bias := out.get("logit_bias"):
        out["logit_bias"] = {token: max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in bias.items()}
    if request.allowed_token_ids == []:
        raise RequestError("allowed_token_ids is empty: nothing could be said; list ids, or leave it out", param="allowed_token_ids")
    if (structured := structured_output(request)) is not None:
        out["structured_outputs"] = structured
    if request.repetition_detection is not None:
        out["repetition_detection"] = RepetitionDetection.of(request.repetition_detection)
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
    if request.top_logprobs and not request.logprobs:
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
    service: Service, request: GenerationRequest, settings: dict[str, Any], given: Sequence[int] | Encoded, reply_id: str
) -> EngineRequest:
    """A checked request for the engine. Raises `RequestError` for what can never be answered, in the names of the request's fields."""
    encoded = given if isinstance(given, Encoded) else Encoded([*given], None)
    prompt = truncated(encoded.ids, request, service.client.facts.max_model_len, settings.get("max_tokens"))
    if encoded.media and len(prompt) < len(encoded.ids):
        raise RequestError("a prompt with images cannot be truncated; leave out truncate_prompt_tokens", param="truncate_prompt_tokens")
    try:
        params = service.processor.params_for(len(prompt), _budgeted(service, request, settings, prompt))
        _check_logprobs(params, service.config.max_logprobs)
        _check_ranking(request, service.client.facts.logprobs)
        return service.processor.request(
            prompt,
            params,
            request_id=service.engine_id(reply_id),
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            adapter=service.adapter_of(request.model),
            beam_width=_beam_width(request, params),
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            media=encoded.media,
            positions=encoded.positions,
        )
    except RequestError as error:
        raise renamed(error, _names_in(request)) from None


def _budgeted(service: Service, request: GenerationRequest, settings: dict[str, Any], prompt: Sequence[int]) -> dict[str, Any]:
    budget = request.thinking_token_budget
    if budget in (None, -1):
        return settings
    check_prompt(prompt, service.client.facts.vocab_size)
    end = service.text.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    bound = budgeted(settings.get("structured_outputs"), budget, service.text.answers, end, "thinking_token_budget")
    return settings if bound is None else {**settings, "structured_outputs": bound}


def _check_logprobs(params: SamplingParams, most: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > most:
            raise RequestError(f"{name}={getattr(params, name)} is above {most}, the limit of this server's --max-logprobs", param=name)


def _check_ranking(request: GenerationRequest, logprobs: LogprobsMode) -> None:
    if logprobs.endswith("logits") and (request.best_of or 1) > (request.n or 1):
        raise RequestError(f"best_of ranks answers by logprobs, and this server gives {logprobs} in their place", param="best_of")


def _names_in(request: GenerationRequest) -> dict[str, str]:
    """Engine settings that this request gave under another name."""
    names = {}
    if isinstance(request, ChatRequest):
        names |= {} if request.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        names |= {"logprobs": "top_logprobs"} if request.logprobs else {}
    elif request.best_of is not None:
        names["n"] = "best_of"
    return names


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error in the names that the request used, for fields that reached the engine's checks under others."""
    text = re.sub(r"\b(\w+)=", lambda match: names.get(match[1], match[1]) + "=", str(error))
    return RequestError(text, param=error.param and names.get(error.param, error.param), code=error.code)


def _beam_width(request: GenerationRequest, params: SamplingParams) -> int:
    if not request.use_beam_search:
        return 0
    if request.stream:
        raise RequestError("beam search cannot be streamed: the beams are ranked at the end", param="use_beam_search")
    return params.n


def truncated(prompt: Sequence[int], request: GenerationRequest, longest: int, max_tokens: int | None) -> Sequence[int]:
    """The prompt cut to `truncate_prompt_tokens` (−1: what leaves room for the answer) at the side that was asked for."""
    keep = request.truncate_prompt_tokens
    if request.truncation_side not in (None, "left", "right"):
        raise RequestError(f"truncation_side={request.truncation_side!r} must be left or right", param="truncation_side")
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(1, longest - (max_tokens or 1))
    if not 1 <= keep <= longest:
        raise RequestError(
            f"truncate_prompt_tokens={keep} is out of range: it must be -1 or from 1 to {longest}", param="truncate_prompt_tokens"
        )
    return prompt[:keep] if request.truncation_side == "right" else prompt[-keep:]
