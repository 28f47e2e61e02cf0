"""One rank's side of media: the store of embeddings, the encoder's work before a step, and positions of several axes."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np
import torch
from pagoda.hal.device import Device
from pagoda.hal.memory import MemoryKind
from pagoda.models.media import EMBEDS, Encoder, EncoderInput, MediaFacts
from pagoda.models.media_tensors import array_of, tensor_of
from pagoda.models.model import Model
from pagoda.serving.engine.plan import Admission, EncodeJob, LongArray, MediaPlan, StepPlan, Unseen
from pagoda.serving.engine.rare_columns import Extras

log = logging.getLogger("pagoda.engine")

_SIZES = r"(?i)\b(shapes?|sizes?|dim(ension)?s?|elements?|index|indices|stride|range|negative|empty|kernel size|input)\b"
"""Words of torch about tensors that do not fit each other."""

EMBEDDING_BYTES = 256 << 20
"""Most bytes of embeddings that are kept."""


def store_rows(facts: MediaFacts, itemsize: int, wanted: int) -> int:
    """Rows of the store: `wanted`, or what `EMBEDDING_BYTES` hold."""
    return min(wanted, EMBEDDING_BYTES // (facts.row_width * itemsize))


class EmbeddingStore:
    """Rows `[N, row_width]` on the device; what lies where is the scheduler's to say (`media.MediaDesk`)."""

    def __init__(self, device: Device, facts: MediaFacts, rows: int, slots: int, dtype: torch.dtype) -> None:
        self._device, self._whole = device, facts.whole
        self.rows = device.memory.alloc(MemoryKind.WORK, (rows, facts.row_width), dtype)
        self._positions = Positions(facts.axes, slots) if facts.axes > 1 else None

    def admit(self, admission: Admission) -> None:
        """A sequence begins, or begins again."""
        if self._positions is not None:
            self._positions.admit(admission)

    def encode(self, model: Model, plan: MediaPlan) -> dict[bytes, Unseen]:
        """Fill rows with the embeddings of new items. Returns why some could not be made, by digest: those rows are zeros."""
        if not plan.jobs:
            return {}
        self._take([job for job in plan.jobs if EMBEDS in job.tensors])
        jobs = [job for job in plan.jobs if EMBEDS not in job.tensors]
        if not jobs:
            return {}
        assert model.encoder is not None
        try:
            self._fill(model.encoder, jobs)
            return {}
        except Exception:  # of whichever item; each is tried alone, so that the others are served
            return {job.digest: why for job in jobs if (why := self._try(model.encoder, job))}

    def _take(self, jobs: Sequence[EncodeJob]) -> None:
        """Items that bring their rows, all of a step at once; what rows have beyond them is zeros."""
        if not jobs:
            return
        given = torch.cat([tensor_of(job.tensors[EMBEDS]).to(self.rows.dtype) for job in jobs])
        rows = given.new_zeros(len(given), self.rows.shape[1])
        rows[:, : given.shape[1]] = given
        self.rows[torch.from_numpy(np.concatenate([job.rows for job in jobs])).to(self.rows.device)] = rows.to(self.rows.device)

    def _try(self, encoder: Encoder, job: EncodeJob) -> Unseen | None:
        try:
            self._fill(encoder, [job])
            return None
        except Exception as error:  # whatever an encoder makes of what a client sent
            log.exception("an encoder failed")
            self.rows[torch.from_numpy(job.rows).to(self.rows.device)] = 0
            return Unseen(f"{type(error).__name__}: {error}", _of_the_item(error))

    def _fill(self, encoder: Encoder, jobs: Sequence[EncodeJob]) -> None:
        made = encoder.forward([self._input(job) for job in jobs])
        for job, rows in zip(jobs, made, strict=True):
            self.rows[torch.from_numpy(job.rows).to(self.rows.device)] = rows.to(self.rows.dtype)

    def extras(self, plan: StepPlan) -> Extras | None:
        """The step's columns of media."""
        positions = self._positions.of(plan) if self._positions is not None else None
        if plan.media is None or not len(plan.media.rows):
            return Extras(positions) if positions is not None else None
        spans = plan.media.spans if self._whole else (None, None)
        return Extras(positions, plan.media.rows, plan.media.sources, *spans)

    def _input(self, job: EncodeJob) -> EncoderInput:
        there = self.rows.device
        tensors = {name: tensor_of(numbers).to(there) for name, numbers in job.tensors.items()}
        cast = {name: t.to(self.rows.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        return EncoderInput(torch.tensor(job.tokens, device=there), cast)


def _of_the_item(error: Exception) -> bool:
    """Whether an encoder fails so at sizes that it was not made for, wherever it runs; what a device says of itself is another matter."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    return isinstance(error, ValueError | LookupError | TypeError | ArithmeticError | AssertionError) or (
        isinstance(error, RuntimeError) and re.search(_SIZES, str(error)) is not None
    )


class Positions:
    """Of models with several positions a token: for each slot those of its prompt, and how far positions after it are from the index."""

    def __init__(self, axes: int, slots: int) -> None:
        self._axes = axes
        self._delta = np.zeros(slots, np.int64)
        self._prompts: dict[int, LongArray] = {}

    def admit(self, admission: Admission) -> None:
        given = admission.positions
        self._delta[admission.slot] = given.delta if given is not None else 0
        if given is not None:
            self._prompts[admission.slot] = array_of(given.values)
        else:
            self._prompts.pop(admission.slot, None)

    def of(self, plan: StepPlan) -> LongArray:
        """`[axes, T]`."""
        ends = np.cumsum(plan.lengths)
        first = ends - plan.lengths
        index = np.arange(plan.num_tokens) + np.repeat(plan.starts - first, plan.lengths)
        positions = np.repeat((index + np.repeat(self._delta[plan.slots], plan.lengths))[None], self._axes, axis=0)
        for row in np.flatnonzero(np.isin(plan.slots, list(self._prompts))) if self._prompts else ():
            prompt, start = self._prompts[int(plan.slots[row])], int(plan.starts[row])
            stop = min(start + int(plan.lengths[row]), prompt.shape[1])
            if start < stop:
                positions[:, first[row] : first[row] + stop - start] = prompt[:, start:stop]
        return positions
