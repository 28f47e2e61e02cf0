"""Which positions of a step are sampled: the last known token of each sampled row, and each draft after it.

A draft is verified by sampling the position that it follows as if there were no draft: draws are functions of (seed, index), so a path of
drafts is right as far as the samples equal the drafts, and the tokens are those of a plain run, whatever the settings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.plan import BoolArray, IntArray, LongArray, StepPlan


class Samples(NamedTuple):
    """S samples of R' sampled rows, rows in order; of a row the one after its known tokens, then one after each of its drafts.

    Attributes:
        rows: `[S]` row of the plan. offsets: `[S]` which of the row's samples: 0, then 1 + the draft's place.
        behind: `[S]` tokens between the sample's position and the row's last one.
        counts: `[R']` samples of each sampled row.
        depths: `[S]` drafts between the known tokens and the sample: the offset, where drafts are a chain.
        before: `[S]` the sample that the draft follows, itself for the first one of a row.
    """

    rows: LongArray
    offsets: LongArray
    behind: LongArray
    counts: LongArray
    depths: LongArray
    before: LongArray

    @property
    def firsts(self) -> LongArray:
        """`[R']` the first sample of each sampled row."""
        firsts: LongArray = np.cumsum(self.counts) - self.counts
        return firsts

    def paths(self, plan: StepPlan) -> list[tuple[int, ...]]:
        """Per sample, the drafts that it stands after."""
        drafts = plan.drafts if plan.drafts is not None else np.empty((0, 0), np.int32)
        paths: list[tuple[int, ...]] = []
        for row, offset, before in zip(self.rows.tolist(), self.offsets.tolist(), self.before.tolist(), strict=True):
            paths.append((*paths[before], int(drafts[row, offset - 1])) if offset else ())
        return paths


class Accepted(NamedTuple):
    """What a step gave its R' sampled rows.

    Attributes:
        tokens: `[R', k + 1]`; counts: `[R']` how many of each row count: the accepted drafts and the token sampled after them.
        places: `[R', k + 1]` the sample of each of these tokens.
        in_place: `[R']` accepted drafts whose K and V lie where a sequence without drafts has them: all of a chain.
    """

    tokens: IntArray
    counts: IntArray
    places: LongArray
    in_place: IntArray


def samples_of(plan: StepPlan) -> Samples:
    """The samples that a plan asks for."""
    rows = np.flatnonzero(plan.sampled)
    if plan.drafts is None or plan.parents is None:
        nothing = np.zeros(len(rows), np.int64)
        return Samples(rows, nothing, nothing, nothing + 1, nothing, np.arange(len(rows)))
    drafted = (plan.drafts[rows] >= 0).sum(1)
    counts = drafted + 1
    owner = np.repeat(np.arange(len(rows)), counts)
    firsts = np.cumsum(counts) - counts
    offsets = np.arange(len(owner)) - firsts[owner]
    followed = np.where(offsets > 0, plan.parents[rows[owner], offsets - 1] + 1, 0)
    depths = draft_depths(plan.parents)[rows[owner], offsets - 1] * (offsets > 0)
    return Samples(rows[owner], offsets, drafted[owner] - offsets, counts, depths, firsts[owner] + followed)


def draft_depths(parents: IntArray) -> LongArray:
    """`[R, k]` how many drafts deep each draft is, itself included."""
    depths = np.ones(parents.shape, np.int64)
    rows = np.arange(len(parents))
    for place in range(parents.shape[1]):
        followed = parents[:, place]
        depths[:, place] += np.where(followed >= 0, depths[rows, followed], 0)
    return depths


def branches(drafts: IntArray, parents: IntArray) -> bool:
    """Whether any row's drafts are more than a chain."""
    return bool(((parents != np.arange(parents.shape[1]) - 1) & (drafts >= 0)).any())


def accepted(samples: Samples, tokens: IntArray, drafts: IntArray) -> Accepted:
    """Follow each row's path of drafts that equal what was sampled where they follow. `tokens` `[S]`."""
    firsts = samples.firsts
    places = np.arange(drafts.shape[1] + 1)
    there = places < samples.counts[:, None]
    where = np.where(there, firsts[:, None] + places, firsts[:, None])
    right = _right(there, where, samples, tokens, drafts)
    depths = np.where(right, samples.depths[where], drafts.shape[1] + 1)
    path = np.zeros((len(where), drafts.shape[1] + 2), np.int64)
    np.put_along_axis(path, depths, where, 1)  # what does not count goes into the last column
    counts = right.sum(1)
    kept = places < counts[:, None]
    in_place = np.cumprod(right[:, 1:] & (depths[:, 1:] == places[1:]), axis=1).sum(1)
    path = np.where(kept, path[:, :-1], 0)
    return Accepted(np.where(kept, tokens[path], 0).astype(np.int32), counts.astype(np.int32), path, in_place.astype(np.int32))


def _right(there: BoolArray, where: LongArray, samples: Samples, tokens: IntArray, drafts: IntArray) -> BoolArray:
    """`[R', k + 1]` which samples count. Of equal drafts after one position, the first."""
    rows, firsts = np.arange(len(where)), samples.firsts
    right, followed = np.zeros(where.shape, np.bool_), np.zeros(where.shape, np.bool_)
    right[:, 0] = True
    ids = drafts[samples.rows[firsts]]
    before = samples.before[where] - firsts[:, None]
    for place in range(1, where.shape[1]):
        parent = before[:, place]
        fits = there[:, place] & right[rows, parent] & ~followed[rows, parent]
        right[:, place] = fits & (ids[:, place - 1] == tokens[where[rows, parent]])
        followed[rows, parent] |= right[:, place]
    return right
