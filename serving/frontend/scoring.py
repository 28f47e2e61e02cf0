"""Scores of pairs of texts: which requests they take, and how the answers become scores."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.hal.errors import RequestError
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.pooling import PoolingParams
from pagoda.serving.frontend.pooled import PooledPrompts, cosine, late_interaction

Numbers = NDArray[np.float32]


class Pair(NamedTuple):
    """One score to make: of one answer (a cross-encoder's), or of two compared. `prompt_token_ids`: all that was read for it."""

    request_id: str
    prompt_token_ids: list[int]
    one: str
    other: str | None


@dataclass(frozen=True)
class ScorePlan:
    """Requests to send, and the pairs that are scored of their answers."""

    requests: list[EngineRequest]
    pairs: list[Pair]

    def scored(self, answers: Mapping[str, Numbers]) -> Iterator[tuple[Pair, float]]:
        """Each pair with its score; answers by request."""
        for pair in self.pairs:
            yield pair, _score(answers[pair.one], answers[pair.other] if pair.other is not None else None)


@dataclass(frozen=True)
class Scorer:
    """Makes plans.

    Args:
        prompts: of the engine.
        truncate: see `PooledPrompts.truncated`.
        params: `use_activation` is taken of it.
    """

    prompts: PooledPrompts
    truncate: int | None
    params: PoolingParams

    def plan(self, first: Sequence[str], second: Sequence[str], request_id: str | None = None) -> ScorePlan:
        """Pair by pair; a single first text goes with each of the second. Raises `RequestError` where numbers differ."""
        if len(first) == 1:
            first = list(first) * len(second)
        if len(first) != len(second) or not second:
            raise RequestError(
                f"{len(first)} first texts and {len(second)} second ones make no pairs; give one, or as many", param="data_1"
            )
        facts, name = self.prompts.pooling, request_id or f"score-{uuid.uuid4().hex}"
        if facts.pooler.task == "embed":
            return self._compared(first, second, name)
        if facts.outputs != 1 or facts.pooler.kind == "all":
            raise RequestError(
                f"this model gives {facts.outputs} scores and not one; serve a cross-encoder with a single label, or an embedding model",
                param="model",
                code="unsupported_task",
            )
        return self._crossed(first, second, name)

    def _crossed(self, first: Sequence[str], second: Sequence[str], name: str) -> ScorePlan:
        requests = [self._pair(a, b, f"{name}-{i}") for i, (a, b) in enumerate(zip(first, second, strict=True))]
        pairs = [Pair(request.request_id, list(request.prompt), request.request_id, None) for request in requests]
        return ScorePlan(requests, pairs)

    def _pair(self, first: str, second: str, name: str) -> EngineRequest:
        ids, begins = self.prompts.pair(first, second)
        cut = self.prompts.truncated(ids, self.truncate)
        begins = begins if begins is not None and begins < len(cut) else None
        return self.prompts.request(cut, replace(self.params, task="classify", second=begins), request_id=name)

    def _compared(self, first: Sequence[str], second: Sequence[str], name: str) -> ScorePlan:
        """Each distinct text is read once."""
        texts = {text: f"{name}-{i}" for i, text in enumerate(dict.fromkeys((*first, *second)))}
        task = self.prompts.pooling.pooler.tasks[0]
        params = replace(self.params, task=task)  # type: ignore[arg-type]
        requests = {
            text: self.prompts.request(self.prompts.truncated(self.prompts.ids(text), self.truncate), params, request_id=made)
            for text, made in texts.items()
        }
        pairs = [
            Pair(f"{name}-{i}", [*requests[a].prompt, *requests[b].prompt], texts[a], texts[b])
            for i, (a, b) in enumerate(zip(first, second, strict=True))
        ]
        return ScorePlan(list(requests.values()), pairs)


def _score(one: Numbers, other: Numbers | None) -> float:
    if other is None:
        return float(one[0])
    return cosine(one, other) if one.ndim == 1 else late_interaction(one, other)
