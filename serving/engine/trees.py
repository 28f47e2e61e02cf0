"""Drafts that branch: where their positions are, and which of each other they see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.plan import IntArray, LongArray, StepPlan
from pagoda.serving.engine.samples import draft_depths


class Tree(NamedTuple):
    """Of a step of T tokens and R rows:

    Attributes:
        nodes: `[R]` int32, drafts of each row, its last tokens.
        seen: `[T]` int64, bit j is set where the token, a draft, sees draft j of its row; −1 for tokens that are no drafts.
        shift: `[T]` int64, how many places before its place in the pages a token's position is.
    """

    nodes: IntArray
    seen: LongArray
    shift: LongArray


def tree_of(plan: StepPlan) -> Tree:
    """Rows without drafts are there too, with 0 nodes."""
    assert plan.drafts is not None and plan.parents is not None
    drafted = plan.drafts >= 0
    nodes = drafted.sum(1)
    bits: LongArray = np.zeros(plan.parents.shape, np.int64)
    rows = np.arange(len(bits))
    for place in range(bits.shape[1]):
        parent = plan.parents[:, place]
        bits[:, place] = np.where(parent >= 0, bits[rows, parent], 0) | (np.int64(1) << place)
    ends = np.cumsum(plan.lengths)
    owner, node = np.nonzero(drafted)
    tokens = ends[owner] - nodes[owner] + node
    seen, shift = np.full(plan.num_tokens, -1, np.int64), np.zeros(plan.num_tokens, np.int64)
    seen[tokens] = bits[owner, node]
    shift[tokens] = node + 1 - draft_depths(plan.parents)[owner, node]
    return Tree(nodes.astype(np.int32), seen, shift)
