"""Structured outputs in the scheduler: a matcher follows each sequence's tokens and says which may come next."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import BoolArray, IntArray
from pagoda.serving.engine.structured import StructuredOutputsParams

T = TypeVar("T")


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
        """Write into zeros which tokens may follow: `[ceil(V/32)]` int32, bit i of word w is token 32w + i; at the end only stop tokens.
        Matchers of several sequences are asked in several threads at once."""
        ...

    def idle(self) -> bool:
        """Whether anything may come from here on."""
        ...

    def failure(self) -> str | None:
        """Why it gave up before the grammar's end, where it did: only stop tokens follow then, and the request fails."""
        ...


Grammar = Callable[[], Matcher]
"""A compiled grammar: makes matchers at its beginning."""

Compiler = Callable[[StructuredOutputsParams], Grammar]
"""From `SamplingParams.structured_outputs` to a grammar; called in threads of its own. Raises `RequestError` for what is none."""


class GrammarMasks(NamedTuple):
    """`StepPlan`'s `mask_rows`, `mask_nodes`, `masks` and `certain`."""

    rows: IntArray
    nodes: IntArray
    bits: IntArray
    certain: IntArray | None = None


class Begun(NamedTuple):
    """Masks after the known tokens of these slots' sequences, one each, and where each slot's lies, -1 for others."""

    slots: IntArray
    bits: IntArray
    places: IntArray


class MaskFiller:
    """Makes the masks of a step. Where they take long, a second thread fills every other row's, since the libraries let the interpreter go
    while they do; where they do not, two threads would only wait for each other's turns in the interpreter."""

    def __init__(self, vocab: int) -> None:
        self._words = (vocab + 31) // 32
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="masks")  # the thread begins with the first work
        self._pace: dict[Any, float] = {}  # seconds that a thread spent on a row's masks when they were last filled in this way
        self._begun: Begun | None = None

    def forget(self) -> None:
        """A new plan is made: what was begun for another is void."""
        self._begun = None

    def begin(self, ledger: Ledger, slots: IntArray) -> BoolArray:
        """Fill the first masks of these slots, whose sequences follow grammars and whose tokens are all known, for the plan that is made.
        Returns where few tokens may come: only there anything can be forced."""
        bits = self._fill([matcher_of(ledger, slot) for slot in slots.tolist()])
        places: IntArray = np.full(ledger.slots.count, -1, np.int32)
        places[slots] = np.arange(len(slots))
        self._begun = Begun(slots, bits, places)
        few: BoolArray = np.count_nonzero(bits, axis=1) <= FEW_WORDS
        return few

    def __call__(self, ledger: Ledger, slots: IntArray, sampled: BoolArray, parents: IntArray | None = None) -> GrammarMasks | None:
        """For the rows of a plan that sample under a grammar; None where there is no such row.

        Such rows are bound: all their tokens are known when the next one is planned. Drafts that the grammar refuses, and what follows
        them, get no mask: their samples never count. `parents`: the plan's.
        """
        rows = np.flatnonzero(ledger.slots.follows[slots] & sampled)
        if not len(rows):
            return None
        chosen = slots[rows]
        first = self._first(ledger, chosen)
        if parents is None:
            return GrammarMasks(rows.astype(np.int32), np.zeros(len(rows), np.int32), first)
        work = [
            _Work(row, matcher_of(ledger, slot), _nodes(ledger, slot, parents[row]))
            for row, slot in zip(rows.tolist(), chosen.tolist(), strict=True)
        ]
        places = np.cumsum([0, *(1 + len(one.nodes) for one in work)]).tolist()
        bits = np.zeros((places[-1], self._words), np.int32)
        bits[places[:-1]] = first
        for one, place, end in zip(work, places, places[1:], strict=False):
            one.out = bits[place:end]
        self._share(_fill_all, work)
        certain: IntArray = np.zeros(len(slots), np.int32)
        for one in work:
            certain[one.row] = _certain(one) if ledger.slots.skips[slots[one.row]] else 0
        ends = certain[rows].tolist()
        numbers = [(one.row, node - end) for one, end in zip(work, ends, strict=True) for node in one.filled if node >= end]
        kept = [place + node for one, place, end in zip(work, places, ends, strict=False) for node in one.filled if node >= end]
        named: IntArray = np.array(numbers, np.int32)
        return GrammarMasks(named[:, 0], named[:, 1], bits if len(kept) == len(bits) else bits[kept], certain if any(ends) else None)

    def _first(self, ledger: Ledger, slots: IntArray) -> IntArray:
        """The masks after these slots' known tokens."""
        begun = self._begun
        if begun is None:
            return self._fill([matcher_of(ledger, slot) for slot in slots.tolist()])
        if np.array_equal(begun.slots, slots):
            return begun.bits
        places = begun.places[slots]
        bits = begun.bits[places]
        missing = np.flatnonzero(places < 0)
        bits[missing] = self._fill([matcher_of(ledger, slot) for slot in slots[missing].tolist()])
        return bits

    def _fill(self, matchers: list[Matcher]) -> IntArray:
        bits = np.zeros((len(matchers), self._words), np.int32)
        if matchers:
            self._share(_fill_each, list(zip(matchers, bits, strict=True)))
        return bits

    def _share(self, fill: Callable[[list[T]], None], work: list[T]) -> None:
        began, mine = time.perf_counter(), work
        if len(work) * self._pace.get(fill, 0.0) < WORTH_A_THREAD:
            fill(work)
        else:
            mine, others = work[::2], work[1::2]
            helped = self._helper.submit(fill, others)
            fill(mine)
            helped.result()
        self._pace[fill] = (time.perf_counter() - began) / len(mine)


WORTH_A_THREAD = 1e-3
"""Seconds of masks below which handing half of them over takes longer than it saves."""

FEW_WORDS = 64
"""Words of a mask that are not 0 where something may be forced: then only beginnings of one text, and what may follow it, can come."""

_NOBODY: IntArray = np.empty(0, np.int32)


@dataclass
class _Work:
    """A row's masks: `nodes` are its drafts, `out` `[1 + drafts, words]`, of which the first is there; `filled` says which nodes have one,
    ascending."""

    row: int
    matcher: Matcher
    nodes: list[tuple[int, int]]
    out: IntArray = field(default_factory=lambda: _NOBODY)
    filled: list[int] = field(default_factory=list)


def matcher_of(ledger: Ledger, slot: int) -> Matcher:
    """The sequence's, brought up to its known tokens."""
    sequence, state = ledger.slots.sequence(slot), ledger.slots
    if sequence.matcher is None:
        assert sequence.request.grammar is not None
        sequence.matcher = sequence.request.grammar()
    begun, known = len(sequence.request.source.prompt) + sequence.matched, int(state.known[slot])
    if known > begun:
        sequence.matcher.accept(state.tokens[slot, begun:known].tolist())
        sequence.matched += known - begun
    return sequence.matcher


def release_idle(ledger: Ledger, slots: IntArray) -> None:
    """Let those of these slots go their ways whose grammars, of a budget alone, have nothing more to say about their known tokens."""
    for slot in slots[ledger.slots.frees[slots] & ledger.slots.follows[slots]].tolist():
        if matcher_of(ledger, slot).idle():
            ledger.slots.release(slot)


def _nodes(ledger: Ledger, slot: int, parents: IntArray) -> list[tuple[int, int]]:
    """(token, parent) of each of the slot's drafts."""
    state = ledger.slots
    known, count = int(state.known[slot]), int(state.drafted[slot])
    return list(zip(state.tokens[slot, known : known + count].tolist(), parents[:count].tolist(), strict=True))


def _fill_each(work: list[tuple[Matcher, IntArray]]) -> None:
    for matcher, row in work:
        matcher.fill(row)


def _fill_all(work: list[_Work]) -> None:
    for one in work:
        _fill_row(one)


def _fill_row(work: _Work) -> None:
    """A mask after each draft that may be there (1 + its place); that after the known tokens (node 0) is."""
    matcher, nodes = work.matcher, work.nodes
    children: dict[int, list[int]] = {}
    for place, (_, parent) in enumerate(nodes):
        children.setdefault(parent, []).append(place)

    def visit(place: int) -> None:
        if place >= 0:
            matcher.fill(work.out[place + 1])
        work.filled.append(place + 1)
        for child in children.get(place, ()):
            if matcher.advance(nodes[child][0]):
                visit(child)
                matcher.go_back()

    visit(-1)
    work.filled.sort()


def _certain(work: _Work) -> int:
    """How many of its drafts, a chain from the first on, are each the only token that may come."""
    count = 0
    for token, parent in work.nodes[: len(work.filled) - 1]:
        mask = work.out[count]
        alone = parent == count - 1 and work.filled[count + 1] == count + 1 and np.count_nonzero(mask) == 1
        if not alone or int(mask.view(np.uint32)[token // 32]) != 1 << token % 32:
            break
        count += 1
    return count
