"""What completions and chat both read from a request."""

from __future__ import annotations

from typing import NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.openai.protocol import GenerationRequest
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


def request_id(request: Request) -> str:
    """The id that the middleware gave the request: the one of its header, or a new one."""
    given: str = request.scope["state"]["request_id"]
    return given
