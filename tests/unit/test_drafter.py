"""The drafter protocol on prompt lookup."""

from __future__ import annotations

import numpy as np
from pagoda.serving.engine.spec.drafter import DraftState, PromptLookup


def propose(tokens, count=4, room=9, **sizes):
    tokens = [np.array(row, np.int32) for row in tokens]
    state = DraftState(np.arange(len(tokens), dtype=np.int32), tokens, np.full(len(tokens), room, np.int32))
    return PromptLookup(count, **sizes).propose(state)


def test_a_repeated_ending_goes_on_as_before():
    draft = propose([[1, 2, 3, 4, 5, 9, 2, 3], [7, 8, 7, 8, 7]])
    assert draft.ids.tolist() == [[4, 5, 9, 2], [8, 7, -1, -1]]
    assert draft.parents.tolist() == [[-1, 0, 1, 2]] * 2


def test_the_longest_ending_wins_and_then_the_newest_place():
    assert propose([[1, 2, 8, 3, 2, 9, 1, 2]]).ids[0, 0] == 8
    assert propose([[2, 8, 2, 9, 2]], longest=1).ids[0, 0] == 9


def test_nothing_is_guessed_without_a_match_or_room():
    assert (propose([[1, 2, 3], [5]]).ids == -1).all()
    assert (propose([[1, 2, 1]], shortest=2).ids == -1).all()
    assert propose([[1, 2, 3, 1]], room=1).ids.tolist() == [[2, -1, -1, -1]]
