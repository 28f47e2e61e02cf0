"""Who guesses the next tokens: the `Drafter` protocol, and the least one of them, which looks them up in the sequence itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from pagoda.hal.kv import LayerCache
from pagoda.serving.engine.plan import FloatArray, IntArray


class TokenStates(NamedTuple):
    """Hidden states after the wanted layers `[L, N, width]` float32, of a sequence's tokens from position `start` on."""

    start: int
    states: FloatArray


class DraftState(NamedTuple):
    """What a drafter sees of a step. R rows.

    Attributes:
        slots: `[R]` int32.
        tokens: per row the known tokens, prompt and output; views that must not be kept or written.
        room: `[R]` int32, most tokens that may be drafted for the row.
        hidden: of each row the tokens computed since the drafter was asked last (some again: then `start` lies below what it had), up to
            the one before the newest; tokens of a prefix hit have none. None where nothing was computed since; empty where none is wanted.
    """

    slots: IntArray
    tokens: Sequence[IntArray]
    room: IntArray
    hidden: Sequence[TokenStates | None] = ()


class Draft(NamedTuple):
    """Guesses. `ids` `[R, k]` int32, −1 past a row's last one; `parents` `[R, k]` int32: the draft that each one follows, −1 for
    the known tokens (a chain is −1, 0, 1, …). Parents come before children, and what follows one token differs."""

    ids: IntArray
    parents: IntArray


class Drafter(Protocol):
    """Attributes:
    wants: layers whose hidden states it needs.
    caches: what its own layers store per token: they form their own cache groups.
    branches: its drafts are trees, at most `MOST_DRAFTS` of a row (and else chains).
    """

    branches: bool
    wants: tuple[int, ...]
    caches: tuple[LayerCache, ...]

    def propose(self, state: DraftState) -> Draft:
        """Guess what follows each row's tokens, at most `room` of them."""
        ...


class PromptLookup:
    """Guesses that a sequence goes on as it did after the last occurrence of its newest `longest` … `shortest` tokens.

    Args:
        count: tokens to guess. longest, shortest: lengths of the ending to look for, longest first.
    """

    branches = False
    wants: tuple[int, ...] = ()
    caches: tuple[LayerCache, ...] = ()

    def __init__(self, count: int, longest: int = 4, shortest: int = 1) -> None:
        self._count, self._longest, self._shortest = count, longest, shortest

    def propose(self, state: DraftState) -> Draft:
        ids = np.full((len(state.slots), self._count), -1, np.int32)
        for row, (tokens, room) in enumerate(zip(state.tokens, state.room.tolist(), strict=True)):
            found = self._continuation(tokens)[: min(room, self._count)]
            ids[row, : len(found)] = found
        chain = np.arange(-1, self._count - 1, dtype=np.int32)
        return Draft(ids, np.broadcast_to(chain, ids.shape).copy())

    def _continuation(self, tokens: IntArray) -> IntArray:
        """What stands after the newest place among those where the longest ending stands."""
        found, best = np.flatnonzero(tokens[:-1] == tokens[-1]), tokens[:0]
        for length in range(1, self._longest + 1):
            if length > 1:
                found = found[found >= length - 1]
                found = found[tokens[found - length + 1] == tokens[-length]]
            if not len(found):
                break
            if length >= self._shortest:
                best = tokens[found[-1] + 1 :]
        return best
