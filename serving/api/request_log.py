"""What `--enable-log-requests` says of a request (its id, its prompt, its settings), and `--enable-log-outputs` of its answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.frontend.text import Tokenizer
from pagoda.serving.frontend.text_deltas import TextDelta

log = logging.getLogger("pagoda.api")


def request_line(request: EngineRequest, tokenizer: Tokenizer, most: int | None) -> str:
    """`most`: how much of the prompt is told, in tokens and in characters."""
    ids = list(request.prompt[:most])
    text = tokenizer.decode(ids, skip_special_tokens=False)[:most]
    settings = request.params if request.pooling is None else request.pooling
    return (
        f"received request {request.request_id}: prompt: {text!r}, prompt_token_ids: {ids}, params: {settings}, adapter: {request.adapter}"
    )


class AnswerLog:
    """Logs one request's answer at its end, a line a sequence; and each part as it comes, where `parts` says so."""

    def __init__(self, request_id: str, most: int | None, parts: bool) -> None:
        """`most`: how much of an answer is told, in tokens and in characters."""
        self._request_id, self._most, self._parts = request_id, most, parts
        self._texts: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._ends: dict[int, str] = {}

    def step(self, deltas: Sequence[TextDelta]) -> None:
        for delta in deltas:
            self._texts.setdefault(delta.index, []).append(delta.text)
            self._token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._ends[delta.index] = delta.finish_reason
            if self._parts:
                self._say("part", delta.index, delta.text, delta.token_ids, delta.finish_reason)

    def end(self) -> None:
        """Whatever the end was; a sequence that has not come to its own ended with its client."""
        for index, texts in sorted(self._texts.items()):
            self._say("answer", index, "".join(texts), self._token_ids[index], self._ends.get(index, "abort"))

    def _say(self, what: str, index: int, text: str, token_ids: Sequence[int], end: str | None) -> None:
        cut = slice(self._most)
        told = text[cut], list(token_ids[cut])
        log.info("%s of request %s, sequence %d: %r, token_ids: %s, finish_reason: %s", what, self._request_id, index, *told, end)
