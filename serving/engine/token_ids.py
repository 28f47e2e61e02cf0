"""The token ids that a request brings, checked against the rows that the model has: by the text side, and by the engine for itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import IntArray


def check_ids(request: EngineRequest, vocab_size: int) -> None:
    """Raises `RequestError` naming the first token id, and its field, that the model does not have."""
    check_prompt(request.prompt, vocab_size)
    _check_params(request.params, vocab_size)


def check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    """The same of a prompt alone, for whoever reads it before there is a request."""
    _check("prompt", prompt, vocab_size)


def checked_prompt(request: EngineRequest, vocab_size: int) -> IntArray:
    """The prompt, read-only, once all ids of the request are known to be the model's; raises as `check_ids`."""
    prompt = request.prompt
    try:
        tokens = np.frombuffer(struct.pack(f"{len(prompt)}i", *prompt), np.int32)
    except struct.error:  # an id that no 32 bits hold
        check_ids(request, vocab_size)
        raise
    if len(tokens) and int(tokens.view(np.uint32).max()) >= vocab_size:  # what is negative is large
        check_ids(request, vocab_size)
    _check_params(request.params, vocab_size)
    return tokens


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    if params.stop_token_ids:
        _check("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.logit_bias:
        _check("logit_bias", tuple(params.logit_bias), vocab_size)
    if params.allowed_token_ids:
        _check("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if params.bad_words_token_ids:
        _check("bad_words", tuple(token for word in params.bad_words_token_ids for token in word), vocab_size)
    if any(not word for word in params.bad_words_token_ids):
        raise RequestError("bad_words must not hold an empty word", param="bad_words")


def _check(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"{name} holds the token id {wrong}; the model's ids go from 0 to {vocab_size - 1}", param=name)
