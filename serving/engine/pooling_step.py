"""What a step of a pooling model leaves: hidden states are kept until a prompt is whole, pooled on the device, finished on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.hal.stream import Event
from pagoda.models.pooling import Pooler, PoolKind
from pagoda.serving.engine.plan import Admission, FloatArray, StepPlan, StepResult
from pagoda.serving.engine.pooling import PoolingParams, kind_of, task_of


class Asked(NamedTuple):
    """Of a slot: its request's settings and prompt."""

    params: PoolingParams
    prompt: tuple[int, ...]


class Answer(NamedTuple):
    """Of a sampled row: how many pooled rows are its, and what was asked."""

    rows: int
    asked: Asked


@dataclass
class Collector:
    """Hidden states of prompts that take several steps, by slot: what the last step of each needs of the others."""

    pooler: Pooler
    _asked: dict[int, Asked] = field(default_factory=dict)
    _parts: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def admit(self, admission: Admission) -> None:
        """A prompt begins, or begins again."""
        self._asked[admission.slot] = Asked(admission.pooling or PoolingParams(), admission.prompt)
        self._parts.pop(admission.slot, None)

    def take(self, plan: StepPlan, hidden: torch.Tensor) -> tuple[torch.Tensor, list[Answer]]:
        """hidden `[T, width]` of the step → what is to be pooled of the prompts that it completes `[N, width]`, and whose it is."""
        rows, answers, first = [], [], 0
        columns = (plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.sampled.tolist())
        for slot, start, length, last in zip(*columns, strict=True):
            asked, states = self._asked[slot], hidden[first : first + length]
            first += length
            kind = kind_of(asked.params, self.pooler)
            self._keep(slot, kind, start, states)
            if last:
                pooled = _pooled(kind, states, self._parts.pop(slot, []), start + length)
                rows.append(pooled)
                answers.append(Answer(len(pooled), asked))
        return torch.cat(rows) if rows else hidden[:0].float(), answers

    def _keep(self, slot: int, kind: PoolKind, start: int, states: torch.Tensor) -> None:
        parts = self._parts.setdefault(slot, [])
        if kind == "all":
            parts.append(states.float())
        elif kind == "mean":
            parts.append(states.float().sum(0, keepdim=True))
        elif kind == "cls" and start == 0:
            parts.append(states[:1].float())


def _pooled(kind: PoolKind, states: torch.Tensor, parts: list[torch.Tensor], tokens: int) -> torch.Tensor:
    if kind == "last":
        return states[-1:].float()
    whole = torch.cat(parts)
    return whole.sum(0, keepdim=True) / tokens if kind == "mean" else whole


@dataclass(frozen=True)
class PooledPending:
    """A step that was started: `wait` blocks until its numbers `[N, outputs]` are on the host."""

    plan: StepPlan
    host: torch.Tensor
    answers: list[Answer]
    pooler: Pooler
    event: Event

    @property
    def done(self) -> bool:
        return self.event.done()

    def wait(self) -> StepResult:
        self.event.wait()
        numbers: FloatArray = self.host.numpy()
        pooled, first = {}, 0
        for row, answer in enumerate(self.answers):
            pooled[row] = finished(numbers[first : first + answer.rows].copy(), answer.asked, self.pooler)
            first += answer.rows
        count = len(self.answers)
        bad = tuple(row for row, values in pooled.items() if not np.isfinite(values).all())
        return StepResult(self.plan.step, np.zeros((count, 1), np.int32), np.ones(count, np.int32), bad_rows=bad, pooled=pooled)


def finished(rows: FloatArray, asked: Asked, pooler: Pooler) -> FloatArray:
    """One answer of its pooled rows: those that count, cut, then normalised or activated as asked; `[outputs]`, or `[tokens, outputs]`."""
    params = asked.params
    if pooler.task == "embed":
        values = rows[:, : params.dimensions]
        unit = pooler.normalize if params.use_activation is None else params.use_activation
        values = _unit(values) if unit else values
    else:
        values = _scores(rows, asked, pooler)
    return values if task_of(params, pooler).startswith("token_") else values[0]


def _scores(rows: FloatArray, asked: Asked, pooler: Pooler) -> FloatArray:
    if pooler.step_tag is not None and len(rows) == len(asked.prompt):
        rows = rows[np.array(asked.prompt) == pooler.step_tag]
    if pooler.returned:
        rows = rows[:, list(pooler.returned)]
    active = asked.params.use_activation is not False
    return ACTIVATIONS[pooler.activation](rows) if active else rows


def _unit(rows: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    unit: FloatArray = (rows / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


def _softmax(rows: FloatArray) -> FloatArray:
    weights: NDArray[np.float32] = np.exp(rows - rows.max(-1, keepdims=True, initial=-np.inf))
    return weights / weights.sum(-1, keepdims=True)


def _sigmoid(rows: FloatArray) -> FloatArray:
    return (0.5 * (1 + np.tanh(0.5 * rows))).astype(np.float32)


ACTIVATIONS: dict[str, Callable[[FloatArray], FloatArray]] = {"softmax": _softmax, "sigmoid": _sigmoid, "none": lambda rows: rows}
