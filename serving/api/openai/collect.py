"""Whole answers for requests that do not stream: the text deltas of each sequence put together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pagoda.serving.api.openai.replies import PromptTokensDetails, Usage
from pagoda.serving.api.service import Service, Step
from pagoda.serving.api.stream import merged
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.frontend.text_deltas import TextDelta


@dataclass
class Answer:
    """One sequence so far."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    @property
    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(len(self.logprobs), 1)


@dataclass
class Answers:
    """The sequences of one prompt."""

    request: EngineRequest
    sequences: dict[int, Answer] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    _pieces: dict[int, tuple[list[str], list[int]]] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        self.cached_tokens += step.cached_tokens
        self.prompt_logprobs = step.prompt_logprobs or self.prompt_logprobs
        for delta in step.deltas:
            self._add(delta)

    def _add(self, delta: TextDelta) -> None:
        answer = self.sequences.setdefault(delta.index, Answer(delta.index))
        texts, tokens = self._pieces.setdefault(delta.index, ([], []))
        texts.append(delta.text)
        tokens.extend(delta.token_ids)
        answer.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            answer.finish_reason, answer.stop_reason, answer.score = delta.finish_reason, delta.stop_reason, delta.cumulative_logprob

    def ordered(self) -> list[Answer]:
        for index, (texts, tokens) in self._pieces.items():
            self.sequences[index].text, self.sequences[index].token_ids = "".join(texts), tuple(tokens)
        return [self.sequences[index] for index in sorted(self.sequences)]

    def best(self, n: int) -> list[Answer]:
        """The `n` sequences with the highest logprob per token, or all in order when there are no more."""
        answers = self.ordered()
        if len(answers) <= n:
            return answers
        return sorted(answers, key=lambda answer: -answer.mean_logprob)[:n]


async def collect(service: Service, requests: Sequence[EngineRequest]) -> list[Answers]:
    """Run all requests to their ends. The first error ends the others."""
    out = [Answers(request) for request in requests]
    async with aclosing(merged([service.generate(request, patient=True) for request in requests])) as steps:
        async for index, step in steps:
            out[index].add(step)
    return out


class UsageCount:
    """Usage of a reply, kept while it streams; without `completion`, of a prompt that is only scored."""

    __slots__ = ("_cached", "_completion", "_counts", "_prompt")

    def __init__(self, requests: Sequence[EngineRequest], *, completion: bool = True) -> None:
        self._counts = completion
        self._prompt = sum(len(request.prompt) for request in requests)
        self._completion = 0
        self._cached = 0

    def add(self, step: Step) -> None:
        self._cached += step.cached_tokens
        if self._counts:
            for delta in step.deltas:
                self._completion += len(delta.token_ids)

    def add_plain(self, tokens: int) -> None:
        """So many tokens with which nothing else came."""
        self._completion += tokens

    def usage(self) -> Usage:
        return _usage(self._prompt, self._completion, self._cached)


def usage_of(answers: Sequence[Answers], *, completion: bool = True) -> Usage:
    """Usage of whole answers."""
    prompt = sum(len(group.request.prompt) for group in answers)
    generated = sum(len(answer.token_ids) for group in answers for answer in group.ordered()) if completion else 0
    return _usage(prompt, generated, sum(group.cached_tokens for group in answers))


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
    )
