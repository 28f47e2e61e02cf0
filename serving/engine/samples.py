"""Which positions of a step are sampled: the last known token of each sampled row, and each draft after it.

A draft is verified by sampling the position that it follows as if there were no draft: draws are functions of (seed, index), so a path of
drafts is right as far as the samples equal the drafts, and the tokens are those of a plain run, whatever the settings. Where a grammar
leaves one token, that comes without a sample (`StepPlan.certain`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.plan import BoolArray, IntArray, LongArray, StepPlan


class Samples(NamedTuple):
    """S samples of R' sampled rows, rows in order; of a row the one after its known tokens, then one after each of its drafts.

    Attributes:
        rows: `[S]` row of the plan. offsets: `[S]` 0 after the row's known tokens, 1 + the draft's place after a draft.
        behind: `[S]` tokens between the sample's position and the row's last one.
        counts: `[R']` samples of each sampled row.
        depths: `[S]` drafts between the known tokens and the sample: the offset, where drafts are a chain.
        before: `[S]` the sample that the draft follows, itself for the first one of a row.

    Of a row whose first drafts are certain, the first sample is the one after the last of these.
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
            first = before == len(paths)
            paths.append(tuple(drafts[row, :offset].tolist()) if first else (*paths[before], int(drafts[row, offset - 1])))
        return paths


class Accepted(NamedTuple):
    """What a step gave its R' sampled rows.

    Attributes:
        tokens: `[R', k + 1]`; counts: `[R']` how many of each row count: the accepted drafts and the token sampled after them.
        places: `[R', k + 1]` the sample of each of these tokens, the row's first one for those that are certain.
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
    certain = np.zeros(len(rows), np.int64) if plan.certain is None else plan.certain[rows].astype(np.int64)
    counts = drafted + 1 - certain
    owner = np.repeat(np.arange(len(rows)), counts)
    firsts = np.cumsum(counts) - counts
    places = np.arange(len(owner)) - firsts[owner]
    offsets = places + certain[owner]
    followed = np.where(places > 0, plan.parents[rows[owner], offsets - 1] + 1 - certain[owner], 0)
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
    """Follow each row's path of drafts that equal what was sampled where they follow. `tokens` `[S]`; `drafts`: the plan's."""
    firsts, certain = samples.firsts, samples.offsets[samples.firsts]
    mine = drafts[samples.rows[firsts]]
    if not certain.any():
        return _sampled(samples, tokens, mine)
    columns = np.arange(mine.shape[1] + 1)
    later = columns - certain[:, None]  # among what is sampled
    padded = np.pad(mine, ((0, 0), (0, 1)), constant_values=-1)
    kept = _sampled(samples, tokens, np.take_along_axis(padded, np.minimum(columns[:-1] + certain[:, None], len(columns) - 1), 1))
    there = np.maximum(later, 0)
    return Accepted(
        np.where(later < 0, padded, np.take_along_axis(kept.tokens, there, 1)).astype(np.int32),
        (kept.counts + certain).astype(np.int32),
        np.take_along_axis(kept.places, there, 1),
        (kept.in_place + certain).astype(np.int32),
    )


def _sampled(samples: Samples, tokens: IntArray, drafts: IntArray) -> Accepted:
    """The same of `drafts` `[R', k]` that follow the first sample of each row."""
    firsts = samples.firsts
    places = np.arange(drafts.shape[1] + 1)
    there = places < samples.counts[:, None]
    where = np.where(there, firsts[:, None] + places, firsts[:, None])
    right = _right(there, where, samples, tokens, drafts)
    depths = np.where(right, samples.depths[where] - samples.offsets[firsts][:, None], drafts.shape[1] + 1)
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
    before = samples.before[where] - firsts[:, None]
    for place in range(1, where.shape[1]):
        parent = before[:, place]
        fits = there[:, place] & right[rows, parent] & ~followed[rows, parent]
        right[:, place] = fits & (drafts[:, place - 1] == tokens[where[rows, parent]])
        followed[rows, parent] |= right[:, place]
    return right
