"""What `--enable-log-requests` says of a request: its id, its prompt and its settings."""

from __future__ import annotations

from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.frontend.text import Tokenizer


def request_line(request: EngineRequest, tokenizer: Tokenizer, most: int | None) -> str:
    """`most`: how much of the prompt is told, in tokens and in characters."""
    ids = list(request.prompt[:most])
    text = tokenizer.decode(ids, skip_special_tokens=False)[:most]
    settings = request.params if request.pooling is None else request.pooling
    return (
        f"received request {request.request_id}: prompt: {text!r}, prompt_token_ids: {ids}, params: {settings}, adapter: {request.adapter}"
    )
