"""Steps of nobody, for a warm-up and for captures: they read and write page 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pagoda.serving.engine.batch import Bucket
from pagoda.serving.engine.capture_plan import Job
from pagoda.serving.engine.pages import Pages
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import Admission, IntArray, StepPlan
from pagoda.serving.engine.rare_columns import EDIT_BUCKETS

WARM_PROMPTS = ((1, 2), (2, 5), (16, 17))
"""Rows and tokens a row of small prompt steps: attention cuts blocks by query tokens, and compilers make one kernel for a lone row."""
WARM_KINDS = (SamplingParams(temperature=0), SamplingParams(seed=0))
WARM_SAMPLING = (
    SamplingParams(seed=0, top_p=0.9),
    *(SamplingParams(temperature=heat, seed=0, top_p=p, logit_bias={0: 1.0}) for heat, p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9))),
)
"""Filters, and edited logits, which are float32: kernels of their own that a first request should not wait for."""


WARM_WHOLE = (
    SamplingParams(temperature=0), SamplingParams(seed=0), SamplingParams(seed=0, top_p=0.9), SamplingParams(seed=0, presence_penalty=1.0),
    SamplingParams(seed=0, logit_bias=dict.fromkeys(range(EDIT_BUCKETS[0] + 1), 0.5)),
)  # fmt: skip
"""Every way to sample where shapes are static."""


class Dummies:
    """Plans whose rows take the slots from 0 on, so that no sequence may have one.

    Args:
        pages: the pool. most: rows of a step. tokens: of a step. longest: tokens of a sequence. encoder: the model has one.
    """

    def __init__(self, pages: Pages, most: int, tokens: int, longest: int, encoder: bool) -> None:
        self._pages, self._most, self._tokens, self._longest, self._encoder = pages, most, tokens, longest, encoder

    def plan(self, rows: int, length: int, params: SamplingParams, adapted: bool) -> StepPlan:
        """A step of so many rows of `length` tokens; `adapted`: with an empty adapter."""
        return self._plan(np.full(rows, length, np.int32), params, adapted)

    def of(self, job: Job) -> StepPlan:
        """A step that falls into the job's bucket."""
        if job.prompts:
            return self.prompts(job.bucket, job.params, job.adapted)
        ones = np.ones(min(job.bucket.rows or 1, self._most), np.int32)
        return self._plan(ones, job.params, job.adapted, job.shared, job.alike)

    def prompts(self, bucket: Bucket, params: SamplingParams, adapted: bool) -> StepPlan:
        """A step with prompts that falls into `bucket`."""
        assert bucket.rows is not None and bucket.tokens is not None
        tokens = max(2, min(bucket.tokens, self._tokens))
        rows = min(bucket.rows, self._most, tokens - 1)
        length, more = divmod(min(tokens, rows * self._longest), rows)
        return self._plan(length + (np.arange(rows) < more).astype(np.int32), params, adapted)

    def _plan(
        self, lengths: IntArray, params: SamplingParams, adapted: bool, shared: int = 0, alike: tuple[bool, ...] = ()
    ) -> StepPlan:  # fmt: skip
        """Rows behind `shared` tokens in page 1, which they have in common in the groups that `alike` says, or in all."""
        rows, sizes = len(lengths), self._pages.page_sizes
        ones, zeros = np.ones(rows, np.int32), np.zeros(rows, np.int32)
        tables = tuple(np.zeros((rows, width), np.int32) for width in self._pages.table_widths(shared + int(lengths.max())))
        for table, size, begins in zip(tables, sizes, alike or (True,) * len(sizes), strict=True):
            table[:, : shared // size if size and begins else 0] = 1
        slots, ids = np.arange(rows, dtype=np.int32), np.zeros(int(lengths.sum()), np.int32)
        admissions = tuple(Admission(slot, params, (0,)) for slot in range(rows))
        adapters = zeros if adapted else None
        starts = zeros + np.int32(shared)
        plan = StepPlan(0, slots, starts, lengths, ids, tables, ones > 0, zeros > 0, zeros, admissions, adapters=adapters)
        return replace(plan, cross_lengths=ones) if self._encoder else plan
