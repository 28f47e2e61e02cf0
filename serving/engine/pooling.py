"""Requests that are answered with vectors or scores instead of tokens: their settings, their answer, and what can be refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.models.pooling import Pooler, PoolKind

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")


@dataclass(frozen=True)
class PoolingParams:
    """Settings of one request; anything out of range raises `RequestError` naming the field.

    Attributes:
        task: what is asked for; None: what the model does.
        use_activation: vectors have length 1, scores are probabilities; None: as the model has it.
        dimensions: only so many numbers of a vector, from its beginning (Matryoshka, arXiv:2205.13147).
        skip_reading_prefix_cache: nothing of the prompt comes from earlier requests' pages.
        second: where the second text of a pair begins in the prompt; its tokens are of type 1.
    """

    task: PoolingTask | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    skip_reading_prefix_cache: bool | None = None
    second: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task={self.task!r} is unknown; there are {', '.join(TASKS)}", param="task")
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError(f"dimensions={self.dimensions} must be at least 1", param="dimensions")


class Pooled(NamedTuple):
    """An answer: `shape` of the numbers in `data`, float32 and little-endian, row after row."""

    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class PoolingFacts:
    """What is known of a model that pools: its pooler, and how many numbers an answer has."""

    pooler: Pooler
    outputs: int


def task_of(params: PoolingParams, pooler: Pooler) -> PoolingTask:
    """What the request is answered with."""
    chosen = params.task or pooler.tasks[0]
    assert chosen in TASKS
    return chosen  # type: ignore[return-value]


def kind_of(params: PoolingParams, pooler: Pooler) -> PoolKind:
    """Which hidden states count for it."""
    return "all" if task_of(params, pooler).startswith("token_") else pooler.kind


def check_pooling(params: PoolingParams | None, facts: PoolingFacts | None) -> None:
    """Raises `RequestError` where the model does not do what is asked for."""
    if params is None and facts is None:
        return
    if params is None:
        assert facts is not None
        raise RequestError(
            f"this model does not generate text, it serves {' and '.join(facts.pooler.tasks)}: ask for that, or serve another model",
            param="model",
            code="unsupported_task",
        )
    if facts is None:
        raise RequestError(
            "this model generates text and gives no vectors or scores: serve one that does, or start the engine with --runner pooling",
            param="model",
            code="unsupported_task",
        )
    tasks = facts.pooler.tasks
    if params.task is not None and params.task not in tasks:
        raise RequestError(
            f"task {params.task!r} was asked for, this model serves {' and '.join(tasks)}", param="task", code="unsupported_task"
        )
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, facts)


def _check_dimensions(asked: int, facts: PoolingFacts) -> None:
    if facts.pooler.task != "embed":
        raise RequestError("dimensions are of vectors, and this model gives scores; leave them out", param="dimensions")
    if asked > facts.outputs:
        raise RequestError(f"dimensions={asked} exceeds the {facts.outputs} numbers of this model's vectors", param="dimensions")
