"""What the SDK returns of models that answer with vectors or scores, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pagoda.serving.engine.pooling import Pooled

T = TypeVar("T")


@dataclass(frozen=True)
class PoolingOutput:
    """The numbers as they are: float32 `[outputs]`, or `[tokens, outputs]`."""

    data: NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """A number for each label; `labels` are their names, empty where they have none."""

    probs: list[float]
    labels: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(frozen=True)
class PooledRequestOutput(Generic[T]):
    """One prompt and its answer.

    Attributes:
        prompt_token_ids: what the model read. num_cached_tokens: of them, those that a prefix hit saved.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


PoolingRequestOutput = PooledRequestOutput[PoolingOutput]
EmbeddingRequestOutput = PooledRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PooledRequestOutput[ClassificationOutput]
ScoringRequestOutput = PooledRequestOutput[ScoringOutput]


def numbers(pooled: Pooled) -> NDArray[np.float32]:
    """The answer as an array of its shape."""
    return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)
