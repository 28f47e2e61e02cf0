"""What completions and chat both read from a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType
from pagoda.hal.errors import RequestError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.openai.protocol import GenerationRequest
from pagoda.serving.frontend.text import Tokenizer
from starlette.requests import Request


class StreamUsage(NamedTuple):
    """Whether usage comes in a last chunk of its own, and in every chunk."""

    final: bool
    continuous: bool


def stream_usage(request: GenerationRequest, config: ServerConfig) -> StreamUsage:
    """What the request and the server's flag ask for. Raises for `stream_options` without `stream`."""
    options = request.stream_options
    if options is not None and not request.stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    final = bool(options and options.include_usage) or config.enable_force_include_usage
    return StreamUsage(final, final and bool(options and options.continuous_usage_stats))


def as_token_ids(request: GenerationRequest, config: ServerConfig) -> bool:
    """Whether logprobs name tokens by id."""
    if request.return_tokens_as_token_ids is None:
        return config.return_tokens_as_token_ids
    return request.return_tokens_as_token_ids


def prompt_text(request: GenerationRequest, tokenizer: Tokenizer, prompt: Sequence[int]) -> str | UnsetType:
    """The prompt as the model reads it, where the request asks for it."""
    return tokenizer.decode(prompt, skip_special_tokens=False) if request.return_prompt_text else UNSET


def request_id(request: Request) -> str:
    """The id that the middleware gave the request: the one of its header, or a new one."""
    given: str = request.scope["state"]["request_id"]
    return given
