"""Fields that this server knows but does not serve: refused by name, never silently ignored."""

from __future__ import annotations

from typing import Any

from pagoda.hal.errors import RequestError

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "function_call": ("none",),
    "suffix": ("",),
}
_REFUSED = (
    "functions",
    "function_call",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "repetition_detection",
    "thinking_token_budget",
    "watermarking",
    "logits_processors",
    "kv_transfer_params",
    "ec_transfer_params",
    "suffix",
    "prompt_embeds",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
    "mm_processor_kwargs",
    "media_io_kwargs",
)


def refuse_unsupported(request: Any) -> None:
    """Raises `RequestError` naming the first field that is set to something without which the answer would be another."""
    for name in _REFUSED:
        value = getattr(request, name, None)
        if value is None or (value in ([], {}) and name != "guided_json") or value in _HARMLESS.get(name, ()):
            continue
        raise RequestError(f"{name} is not supported by this server yet; leave it out", param=name, code="unsupported_parameter")
    if getattr(request, "store", False):
        raise RequestError("store=true is not supported: this server keeps no replies", param="store", code="unsupported_parameter")
