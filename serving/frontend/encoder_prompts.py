"""Prompts of encoder-decoder models: what the encoder reads, and what the decoder's text begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagoda.hal.errors import RequestError
from pagoda.models.encoding import EncoderFacts
from pagoda.serving.engine.messages import EncoderPrompt

KEYS = ("encoder_prompt", "decoder_prompt", "multi_modal_data")

Ids = Callable[[Any, bool], list[int]]
"""Token ids of a text, of ids, or of a mapping with either; whether the tokenizer puts its own tokens around a text."""
Listen = Callable[[Any], EncoderPrompt]
"""From a sound, as the caller has it, to what the encoder reads."""


def is_pair(prompt: object) -> bool:
    """Whether a prompt says itself what is for the encoder."""
    return isinstance(prompt, Mapping) and any(key in prompt for key in KEYS)


def split_pair(prompt: Mapping[str, Any], facts: EncoderFacts, ids: Ids, listen: Listen) -> tuple[list[int], EncoderPrompt]:
    """The decoder's ids and the encoder's input of {"encoder_prompt": …, "decoder_prompt": …}, or, where the encoder hears, of
    {"prompt": the decoder's, "multi_modal_data": {"audio": …}}. Raises `RequestError` where something is missing."""
    given = prompt.get("encoder_prompt", prompt)
    below = prompt.get("decoder_prompt") if "encoder_prompt" in prompt else _own_text(prompt)
    text = below.get("prompt") if isinstance(below, Mapping) and "prompt_token_ids" not in below else below
    own = started(ids(text, False) if text else (), facts) if isinstance(text, str) or not text else ids(text, False)
    if facts.kind == "text" and isinstance(given, Mapping) and given.get("multi_modal_data"):
        raise RequestError("this model's encoder reads text only; leave out multi_modal_data", param="multi_modal_data")
    if facts.kind == "text":
        return own, EncoderPrompt(tuple(ids(given, True)))
    media = given.get("multi_modal_data") if isinstance(given, Mapping) else None
    if not isinstance(media, Mapping) or "audio" not in media:
        raise RequestError('this model hears: its encoder\'s prompt needs {"multi_modal_data": {"audio": …}}', param="encoder_prompt")
    return own, listen(media["audio"])


def started(ids: Sequence[int], facts: EncoderFacts) -> list[int]:
    """The decoder's ids of a text, which begin as the model wants them to; ids that a caller gives are left as they are."""
    begins = not facts.start or list(ids[: len(facts.start)]) == list(facts.start)
    return list(ids) if begins and ids else [*facts.start, *ids]


def _own_text(prompt: Mapping[str, Any]) -> Any:
    return prompt.get("prompt_token_ids") or prompt.get("prompt")
