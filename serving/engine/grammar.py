"""Structured outputs in the scheduler: a matcher follows each sequence's tokens and says which may come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import BoolArray, IntArray
from pagoda.serving.engine.structured import StructuredOutputsParams


class Matcher(Protocol):
    """One sequence's place in its grammar."""

    def accept(self, tokens: list[int]) -> None:
        """Tokens that were sampled, in order; those after the grammar's end are ignored."""
        ...

    def advance(self, token: int) -> bool:
        """Go on by a token that is only guessed. False, and nothing changed, where it may not follow."""
        ...

    def go_back(self) -> None:
        """Take back the last `advance` that was not taken back yet."""
        ...

    def forced(self) -> list[int]:
        """Tokens that write what must come next, as the model's tokenizer would write it after what is there; none where more may come.
        Asked only where nothing is guessed."""
        ...

    def fill(self, row: IntArray) -> None:
        """Write which tokens may follow: `[ceil(V/32)]` int32, bit i of word w is token 32w + i. At the end only stop tokens may."""
        ...


Grammar = Callable[[], Matcher]
"""A compiled grammar: makes matchers at its beginning."""

Compiler = Callable[[StructuredOutputsParams], Grammar]
"""From `SamplingParams.structured_outputs` to a grammar; called in threads of its own. Raises `RequestError` for what is none."""


class GrammarMasks(NamedTuple):
    """`StepPlan`'s `mask_rows`, `mask_nodes` and `masks`."""

    rows: IntArray
    nodes: IntArray
    bits: IntArray


def masks(ledger: Ledger, slots: IntArray, sampled: BoolArray, vocab: int, parents: IntArray | None = None) -> GrammarMasks | None:
    """For the rows of a plan that sample under a grammar; None where there is no such row.

    Such rows are bound: all their tokens are known when the next one is planned. Drafts that the grammar refuses, and what follows
    them, get no mask: their samples never count. `parents`: the plan's.
    """
    rows = np.flatnonzero(ledger.slots.follows[slots] & sampled).tolist()
    if not rows:
        return None
    found: list[tuple[int, int, IntArray]] = []
    for row in rows:
        slot = int(slots[row])
        nodes = _nodes(ledger, slot, parents[row] if parents is not None else np.empty(0, np.int32))
        found += ((row, node, mask) for node, mask in _masks_of(matcher_of(ledger, slot), nodes, (vocab + 31) // 32))
    numbers = np.array([(row, node) for row, node, _ in found], np.int32)
    return GrammarMasks(numbers[:, 0], numbers[:, 1], np.stack([mask for _, _, mask in found]))


def matcher_of(ledger: Ledger, slot: int) -> Matcher:
    """The sequence's, brought up to its known tokens."""
    sequence, state = ledger.slots.sequence(slot), ledger.slots
    if sequence.matcher is None:
        assert sequence.request.grammar is not None
        sequence.matcher = sequence.request.grammar()
    begun = len(sequence.request.source.prompt) + sequence.matched
    tokens = state.tokens[slot, begun : int(state.known[slot])].tolist()
    sequence.matcher.accept(tokens)
    sequence.matched += len(tokens)
    return sequence.matcher


def _nodes(ledger: Ledger, slot: int, parents: IntArray) -> list[tuple[int, int]]:
    """(token, parent) of each of the slot's drafts."""
    state = ledger.slots
    known, count = int(state.known[slot]), int(state.drafted[slot])
    return list(zip(state.tokens[slot, known : known + count].tolist(), parents[:count].tolist(), strict=True))


def _masks_of(matcher: Matcher, nodes: list[tuple[int, int]], words: int) -> list[tuple[int, IntArray]]:
    """A mask after the known tokens (node 0) and after each draft that may be there (1 + its place)."""
    children: dict[int, list[int]] = {}
    for place, (_, parent) in enumerate(nodes):
        children.setdefault(parent, []).append(place)
    found: list[tuple[int, IntArray]] = []

    def visit(place: int) -> None:
        mask = np.zeros(words, np.int32)
        matcher.fill(mask)
        found.append((place + 1, mask))
        for child in children.get(place, ()):
            if matcher.advance(nodes[child][0]):
                visit(child)
                matcher.go_back()

    visit(-1)
    return sorted(found, key=lambda one: one[0])
