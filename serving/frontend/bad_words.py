"""`bad_words` as token sequences: each word as it stands and after a space, the way it would be generated."""

from __future__ import annotations

from dataclasses import replace

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.text import Tokenizer


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same settings with `bad_words_token_ids` filled in from `bad_words`."""
    if not params.bad_words:
        return params
    found: dict[tuple[int, ...], None] = dict.fromkeys(params.bad_words_token_ids)
    for word in params.bad_words:
        if not word.strip():
            raise RequestError("bad_words must not hold an empty word", param="bad_words")
        for spelling in (word.lstrip(), " " + word.lstrip()):
            found[tuple(tokenizer.encode(spelling, add_special_tokens=False))] = None
    return replace(params, bad_words_token_ids=tuple(found))
