"""The token ids that a request brings, checked against the rows that the model has: by the text side, and by the engine for itself."""

from __future__ import annotations

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.messages import EngineRequest


def check_ids(request: EngineRequest, vocab_size: int) -> None:
    """Raises `RequestError` naming the first token id, and its field, that the model does not have."""
    params = request.params
    fields = {
        "prompt": request.prompt,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": tuple(token for word in params.bad_words_token_ids for token in word),
    }
    for name, ids in fields.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(f"{name} holds the token id {wrong}; the model's ids go from 0 to {vocab_size - 1}", param=name)
    if any(not word for word in params.bad_words_token_ids):
        raise RequestError("bad_words must not hold an empty word", param="bad_words")
