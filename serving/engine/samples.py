"""Which positions of a step are sampled: the last of each sampled row, and the one before each draft that is to be verified.

A draft is verified by sampling the position before it as if there were no draft: draws are functions of (seed, index), so a chain is
right as far as the samples equal the drafts, and the tokens are those of a plain run, whatever the settings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.plan import IntArray, LongArray, StepPlan
from pagoda.serving.engine.settings import SamplingSlots, Use

ALONE = Use.PENALTY | Use.BAD_WORDS
"""Uses that depend on the tokens before: of rows with them, and of those with a grammar, only the first position is sampled."""


class Samples(NamedTuple):
    """S samples of R' sampled rows, rows in order, positions of a row in order.

    Attributes:
        rows: `[S]` row of the plan. offsets: `[S]` which of the row's samples.
        behind: `[S]` tokens between the sample's position and the row's last one.
        counts: `[R']` samples of each sampled row.
    """

    rows: LongArray
    offsets: LongArray
    behind: LongArray
    counts: LongArray


def samples_of(plan: StepPlan, settings: SamplingSlots) -> Samples:
    """The samples that a plan asks for."""
    rows = np.flatnonzero(plan.sampled)
    if plan.drafts is None:
        nothing = np.zeros(len(rows), np.int64)
        return Samples(rows, nothing, nothing, nothing + 1)
    drafted = (plan.drafts[rows] >= 0).sum(1)
    verified = np.where(_alone(plan, settings, rows), 0, drafted)
    counts = verified + 1
    owner = np.repeat(np.arange(len(rows)), counts)
    offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Samples(rows[owner], offsets, drafted[owner] - offsets, counts)


def accepted(samples: Samples, tokens: IntArray, drafts: IntArray) -> tuple[IntArray, IntArray]:
    """Tokens `[R', k + 1]` and how many of each row count: the accepted drafts and the token sampled after them."""
    firsts = np.cumsum(samples.counts) - samples.counts
    places = np.arange(drafts.shape[1] + 1)
    there = places < samples.counts[:, None]
    matrix = np.where(there, tokens[np.minimum(firsts[:, None] + places, len(tokens) - 1)], 0).astype(np.int32)
    right = (matrix[:, :-1] == drafts[samples.rows[firsts]]) & there[:, 1:]
    return matrix, (1 + np.cumprod(right, axis=1).sum(1)).astype(np.int32)


def _alone(plan: StepPlan, settings: SamplingSlots, rows: LongArray) -> LongArray:
    alone = (settings.use[plan.slots[rows]] & ALONE) != 0
    if plan.mask_rows is not None:
        alone = alone | np.isin(rows, plan.mask_rows)
    return alone
