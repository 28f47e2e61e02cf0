"""Fields that this server knows but does not serve: refused by name, never silently ignored."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

from pagoda.hal.errors import RequestError

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "function_call": ("none",),
    "suffix": ("",),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
}
REFUSED = (
    "functions",
    "function_call",
    "watermarking",
    "logits_processors",
    "kv_transfer_params",
    "ec_transfer_params",
    "suffix",
    "modalities",
    "audio",
    "web_search_options",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_payload",
    "logprob_token_ids",
    "return_token_offsets",
    "return_weight_versions",
    "routed_experts_prompt_start",
)
WITHOUT_EFFECT = ("session_id", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prediction", "store")
"""Accepted: they name the client or its conversation, guess the answer, or want it kept for the client's eyes, and change no answer."""


def refuse_unsupported(request: Any) -> None:
    """Raises `RequestError` naming the first field that is set to something without which the answer would be another."""
    names, values = _refused_of(type(request))
    for name, value in zip(names, values(request), strict=True):
        if value is None or (value in ([], {})) or value in _HARMLESS.get(name, ()):
            continue
        raise RequestError(f"{name} is not supported by this server yet; leave it out", param=name, code="unsupported_parameter")


@cache
def _refused_of(kind: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Those that such a request may have, and how they are read at once."""
    names = tuple(name for name in REFUSED if hasattr(kind, name))
    return names, attrgetter(*names)
