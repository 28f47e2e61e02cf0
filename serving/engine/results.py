"""Brings what a step gave back to the host in one copy, and unpacks it into a `StepResult` when the copy is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pagoda.hal.device import Device
from pagoda.hal.stream import Event, Stream
from pagoda.serving.engine.plan import BoolArray, Captures, IntArray, LongArray, RowLogprobs, StepPlan, StepResult, Unseen
from pagoda.serving.engine.sampler import Logprobs, Sampled
from pagoda.serving.engine.samples import Accepted, Samples, accepted

WORDS = 3
"""Dimensions of `Sampled.words`."""

Piece = tuple[tuple[int, ...], bool]
"""Shape of one array in the buffer, and whether its 32 bits are a float."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Of one row's chunk: `row` in the plan, the tokens scored `[N]`, their logprobs on the device."""

    row: int
    token_ids: LongArray
    values: Logprobs


@dataclass(frozen=True)
class Pending:
    """A step that was started: `wait` blocks until its values are on the host."""

    plan: StepPlan
    samples: Samples
    host: torch.Tensor
    pieces: tuple[Piece, ...]
    event: Event
    logprob_rows: LongArray
    prompts: tuple[PromptLogprobs, ...]
    scored: bool = False
    unseen: dict[bytes, Unseen] = field(default_factory=dict)
    captures: Captures | None = None

    @property
    def done(self) -> bool:
        return self.event.done()

    def wait(self) -> StepResult:
        self.event.wait()
        result = self._result()
        return replace(result, unseen=self.unseen, captures=self.captures) if self.unseen or self.captures else result

    def _result(self) -> StepResult:
        if len(self.pieces[0][0]) == WORDS:
            return self._of_words(self.host.numpy().reshape(self.pieces[0][0])[:, :, : len(self.samples.rows)].copy())
        arrays = iter(_split(self.host.numpy(), self.pieces))
        count = len(self.samples.rows)
        flat, bad = next(arrays)[:count], next(arrays)[:count]
        kept = self._kept(flat)
        return StepResult(
            step=self.plan.step,
            tokens=kept.tokens,
            counts=kept.counts,
            logprobs=_of_rows(self.logprob_rows, kept, flat, arrays) if self.scored else {},
            prompt_logprobs={prompt.row: RowLogprobs(prompt.token_ids.astype(np.int32), *_four(arrays)) for prompt in self.prompts},
            hidden=self._of_tokens(self.plan.tapped, kept, arrays),
            experts=self._of_all_tokens(kept, arrays),
            bad_rows=_rows_of(kept, bad) if bad.any() else (),
            in_place=kept.in_place if self.plan.drafts is not None else None,
        )

    def _of_words(self, words: IntArray) -> StepResult:
        tokens, bad = words[:, 0].T, words[:, 1].T
        runs = self.plan.runs
        counts = np.ones(len(tokens), np.int32) if runs is None else runs
        failed = ((bad != 0) & (np.arange(bad.shape[1]) < counts[:, None])).any(1) if bad.any() else None
        return StepResult(self.plan.step, tokens, counts, bad_rows=() if failed is None else tuple(np.flatnonzero(failed).tolist()))

    def _of_tokens(self, rows: BoolArray | None, kept: Accepted, arrays: Iterator[Any]) -> dict[int, Any]:
        return {} if rows is None else states_of_rows(self.plan, rows, self.samples, kept, next(arrays))

    def _of_all_tokens(self, kept: Accepted, arrays: Iterator[Any]) -> dict[int, Any]:
        rows = self.plan.routed
        if rows is None:
            return {}
        asked = next(arrays)[:, np.repeat(rows, self.plan.lengths)]
        return states_of_rows(self.plan, rows, self.samples, kept, asked)

    def _kept(self, flat: IntArray) -> Accepted:
        if self.plan.drafts is None or not len(flat):
            ones = np.ones(len(flat), np.int32)
            return Accepted(flat[:, None], ones, np.arange(len(flat))[:, None], ones)
        return accepted(self.samples, flat, self.plan.drafts)


class ResultCopier:
    """A ring of pinned host buffers, `depth` of which may hold results that nobody has read yet."""

    def __init__(self, device: Device, capacity: int, depth: int) -> None:
        self._device = device
        self._buffers = [device.memory.host((capacity,), torch.int32) for _ in range(depth + 1)]
        self._turn = 0
        self._static = device.graphs.policy.static_shapes

    def start(
        self,
        stream: Stream,
        plan: StepPlan,
        samples: Samples,
        sampled: Sampled,
        logprob_rows: LongArray,
        prompts: tuple[PromptLogprobs, ...],
        states: Sequence[torch.Tensor] = (),
    ) -> Pending:
        """Copy the real samples, all logprobs and `states`; returns at once.

        logprob_rows: whose logprobs, among the samples. states: of tapped layers and chosen experts, where the plan asks for them.
        """
        if sampled.words is not None:
            host = self._next(sampled.words.numel())
            host.copy_(sampled.words.view(-1), non_blocking=True)
            return Pending(plan, samples, host, ((tuple(sampled.words.shape), False),), stream.record(), logprob_rows, prompts)
        tensors = [sampled.tokens, sampled.bad]  # with padding: shapes depend on the bucket alone
        tensors += sampled.logprobs or ()
        for prompt in prompts:
            tensors += prompt.values
        tensors += states
        flat = torch.cat([_bits(tensor) for tensor in tensors])
        if self._static:
            stream.record()  # what is recorded runs as one program, not once for what is copied and again for what is kept
        host = self._next(len(flat))
        host.copy_(flat, non_blocking=True)
        pieces = tuple((tuple(tensor.shape), tensor.dtype == torch.float32) for tensor in tensors)
        return Pending(plan, samples, host, pieces, stream.record(), logprob_rows, prompts, sampled.logprobs is not None)

    def _next(self, size: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        if size > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._device.memory.host((size,), torch.int32)
        return self._buffers[self._turn][:size]


def states_of_rows(plan: StepPlan, asked: BoolArray, samples: Samples, kept: Accepted, states: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Of `states` of all tokens of the rows asked for, `[L, N, width]`, those of each row, without the drafts that were rejected."""
    rows = np.flatnonzero(asked)
    parts = dict(zip(rows.tolist(), np.split(states, np.cumsum(plan.lengths[rows])[:-1], axis=1), strict=True))
    if plan.drafts is None:
        return parts
    for place, row in enumerate(np.flatnonzero(plan.sampled).tolist()):
        if row in parts:
            last = int(plan.lengths[row] - (plan.drafts[row] >= 0).sum()) - 1  # of the known tokens
            path = samples.offsets[kept.places[place, : kept.counts[place]]]
            if plan.certain is not None and plan.certain[row]:
                path = np.arange(len(path))  # a chain, whose first tokens have no sample
            parts[row] = parts[row][:, np.concatenate([np.arange(last), last + path])]
    return parts


def _rows_of(kept: Accepted, bad: NDArray[Any]) -> tuple[int, ...]:
    """Rows with NaN in a sample that counts."""
    there = np.arange(kept.places.shape[1]) < kept.counts[:, None]
    return tuple(np.flatnonzero(((bad[kept.places] != 0) & there).any(1)).tolist())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As flat int32 words: float32 bit by bit, integers and booleans by value."""
    if tensor.dtype == torch.float32:
        return tensor.reshape(-1).view(torch.int32)
    return tensor.reshape(-1).to(torch.int32)


def _split(words: IntArray, pieces: tuple[Piece, ...]) -> list[NDArray[Any]]:
    arrays, at = [], 0
    for shape, is_float in pieces:
        size = prod(shape)
        # A copy, since the ring's buffer is written again.
        part = words[at : at + size].copy()
        arrays.append((part.view(np.float32) if is_float else part).reshape(shape))
        at += size
    return arrays


def _four(arrays: Any) -> tuple[Any, Any, Any, Any]:
    """Own logprob, rank, then ids before logprobs, as `RowLogprobs` has them."""
    own, rank, top, top_ids = next(arrays), next(arrays), next(arrays), next(arrays)
    return own, rank, top_ids, top


def _of_rows(asked: LongArray, kept: Accepted, tokens: IntArray, arrays: Any) -> dict[int, RowLogprobs]:
    """By sampled row, over the tokens that count. `asked`: samples with logprobs, all of a row's; `arrays`: theirs, or of all."""
    own, rank, top_ids, top = _four(arrays)
    if len(own) > len(asked):
        own, rank, top_ids, top = (array[asked] for array in (own, rank, top_ids, top))
    found = {}
    for row in np.flatnonzero(np.isin(kept.places[:, 0], asked)).tolist():
        path = kept.places[row, : kept.counts[row]]
        at = np.searchsorted(asked, path)
        found[row] = RowLogprobs(tokens[path], own[at], rank[at], top_ids[at], top[at])
    return found
