"""What a step samples and keeps where its first drafts come without a choice: as much as if each had been sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pagoda.serving.engine.plan import StepPlan
from pagoda.serving.engine.samples import accepted, samples_of

CHAIN = st.lists(st.integers(0, 3), max_size=4)
ROW = st.tuples(CHAIN, st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(0, 4), st.booleans())


def plan_of(rows: list[Any]) -> StepPlan:
    """Each row's drafts, behind one known token."""
    most = max(len(drafts) for drafts, *_ in rows)
    ids, parents = np.full((len(rows), most), -1, np.int32), np.full((len(rows), most), -1, np.int32)
    for row, (drafts, *_) in enumerate(rows):
        ids[row, : len(drafts)], parents[row, : len(drafts)] = drafts, np.arange(-1, len(drafts) - 1)
    lengths = np.array([1 + len(drafts) for drafts, *_ in rows], np.int32)
    none = np.zeros(len(rows), np.int32)
    sampled = np.array([each[3] for each in rows])
    return StepPlan(0, none, none, lengths, np.zeros(lengths.sum(), np.int32), (), sampled, sampled, none, drafts=ids, parents=parents)


@given(st.lists(ROW, min_size=1, max_size=5).filter(lambda rows: any(row[3] for row in rows) and any(row[0] for row in rows)))
def test_certain_drafts_are_kept_as_if_they_were_sampled(rows: list[Any]) -> None:
    certain = [min(count, len(drafts)) for drafts, _, count, _ in rows]
    given_tokens = [[*drafts[:count], *tokens[count : len(drafts) + 1]] for (drafts, tokens, *_), count in zip(rows, certain, strict=True)]
    plan = plan_of(rows)
    assert plan.drafts is not None
    short = replace(plan, certain=np.array(certain, np.int32))
    every, some = samples_of(plan), samples_of(short)
    chosen = [row for row, each in enumerate(rows) if each[3]]
    flat = np.array([token for row in chosen for token in given_tokens[row]], np.int32)
    kept = np.concatenate(
        [np.arange(certain[row], len(given_tokens[row])) + first for row, first in zip(chosen, every.firsts, strict=True)]
    )
    for name in ("rows", "offsets", "behind", "depths"):
        assert getattr(some, name).tolist() == getattr(every, name)[kept].tolist()
    assert some.paths(short) == [every.paths(plan)[place] for place in kept]
    whole, part = accepted(every, flat, plan.drafts), accepted(some, flat[kept], plan.drafts)
    for name in ("tokens", "counts", "in_place"):
        assert getattr(part, name).tolist() == getattr(whole, name).tolist()
    for place, row in enumerate(chosen):
        sampled = part.places[place, certain[row] : part.counts[place]]
        assert kept[sampled].tolist() == whole.places[place, certain[row] : part.counts[place]].tolist()
