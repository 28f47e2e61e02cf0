"""What the SDK returns: requests and their completions, with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.serving.engine.messages import EngineRequest, FinishReason, RequestDelta, TokenLogprobs, error_of
from pagoda.serving.frontend.text import Tokenizer
from pagoda.serving.frontend.text_deltas import RequestText, TextDelta


class Logprob(NamedTuple):
    """Of one candidate token: natural log of its probability, its rank from 1, its text."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Candidates of one position by token id, the chosen one first."""


@dataclass
class CompletionOutput:
    """One answer; grows while it streams.

    Attributes:
        index: which of the request's `n`. text: so far, without stop strings. token_ids: with the stop token.
        cumulative_logprob: sum over the chosen tokens, where logprobs were asked for (beam search: of the beam).
        logprobs: one entry a token, where asked for.
        finish_reason: "stop", "length" or "abort"; None while it runs. stop_reason: the stop string or token id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request, seconds since the epoch; None until they happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finished_time is None else self.finished_time - self.arrival_time


@dataclass
class RequestOutput:
    """One prompt and its answers.

    Attributes:
        prompt: its text; None where ids were given. prompt_token_ids: what the model read.
        prompt_logprobs: None for the first position, then one entry a token, where asked for.
        finished: nothing more comes. num_cached_tokens: prompt tokens that a prefix hit saved.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs | None] | None = None


class OutputBuilder:
    """Grows one request's `RequestOutput` from the engine's deltas."""

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._params = request.params
        self._text = RequestText(tokenizer, request.params, request.prompt)
        answers = [CompletionOutput(i, logprobs=None if self._params.logprobs is None else []) for i in range(self._params.n)]
        self.output = RequestOutput(
            request.request_id, prompt, list(request.prompt), answers, RequestMetrics(request.arrival or time.time())
        )

    def push(self, delta: RequestDelta) -> list[TextDelta]:
        """Take one delta into `output`; returns what it added. Raises `PagodaError` when the engine failed the request."""
        if any(part.finish_reason is FinishReason.ERROR for part in delta.sequences):
            error = error_of(delta)
            raise type(error)(f"request {delta.request_id} failed: {error}")
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.cached_tokens)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *map(self._logprobs, delta.prompt_logprobs)]
        added = self._text.push(delta)
        for part in added:
            self._grow(self.output.outputs[part.index], part)
        self._note_times(added, delta.finished or self._text.finished)
        return added

    def take_stopped(self) -> list[int]:
        """See `RequestText`."""
        return self._text.take_stopped()

    def _grow(self, answer: CompletionOutput, part: TextDelta) -> None:
        answer.text += part.text
        answer.token_ids += part.token_ids
        answer.finish_reason, answer.stop_reason = part.finish_reason, part.stop_reason
        if answer.logprobs is not None and part.logprobs is not None:
            answer.logprobs += map(self._logprobs, part.logprobs)
            answer.cumulative_logprob = (answer.cumulative_logprob or 0.0) + sum(entry.logprob for entry in part.logprobs)
        if part.cumulative_logprob is not None:
            answer.cumulative_logprob = part.cumulative_logprob

    def _note_times(self, added: Sequence[TextDelta], finished: bool) -> None:
        metrics, now = self.output.metrics, time.time()
        if metrics.first_token_time is None and any(part.token_ids for part in added):
            metrics.first_token_time = now
        if finished:
            metrics.finished_time = now
            self.output.finished = True

    def _logprobs(self, entry: TokenLogprobs) -> Logprobs:
        ranked = {i: Logprob(p, rank, self._spell(i)) for rank, (i, p) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)}
        return {entry.token_id: Logprob(entry.logprob, entry.rank, self._spell(entry.token_id))} | ranked

    def _spell(self, token_id: int) -> str:
        if token_id >= self._tokenizer.vocab_size:
            return ""  # models may have more rows than the tokenizer has words
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")
