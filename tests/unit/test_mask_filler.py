"""Masks of many rows, filled by one thread or two: each lies at its row and node, those of refused drafts are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pagoda.serving.engine import grammar
from pagoda.serving.engine.grammar import MaskFiller

VOCAB = 70


class Counting:
    """After token t comes t + 1."""

    def __init__(self, next_token: int) -> None:
        self.next = next_token

    def accept(self, tokens: list[int]) -> None:
        assert not tokens

    def advance(self, token: int) -> bool:
        self.next += token == self.next
        return token == self.next - 1

    def go_back(self) -> None:
        self.next -= 1

    def failure(self) -> str | None:
        return None

    def forced(self) -> list[int]:
        return []

    def fill(self, row: Any) -> None:
        assert not row.any()
        row.view(np.uint32)[self.next // 32] = 1 << self.next % 32


def ledger(rows: int, drafted: int, skips: bool = False) -> Any:
    """Each slot's grammar wants token 2 · slot next; its drafts begin so, and every third slot's second one is wrong."""
    tokens = np.zeros((rows, 1 + drafted), np.int32)
    for slot in range(rows):
        tokens[slot, 1:] = 2 * slot + np.arange(drafted)
        if slot % 3 == 0 and drafted > 1:
            tokens[slot, 2] = 69
    request = SimpleNamespace(source=SimpleNamespace(prompt=(0,)))
    sequences = [SimpleNamespace(matcher=Counting(2 * slot), matched=0, request=request) for slot in range(rows)]
    slots = SimpleNamespace(
        follows=np.arange(rows) != 1,
        tokens=tokens,
        known=np.ones(rows, np.int32),
        drafted=np.full(rows, drafted, np.int32),
        sequence=lambda slot: sequences[slot],
        skips=np.full(rows, skips),
        count=rows,
    )
    return SimpleNamespace(slots=slots)


@pytest.mark.parametrize("rows", [2, 3, 24])
@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("pace", [0.0, 1.0])
def test_each_mask_lies_at_its_row_and_node(rows: int, drafted: int, pace: float) -> None:
    """Where masks took long before, a second thread fills half of them."""
    parents = np.tile(np.arange(-1, drafted - 1, dtype=np.int32), (rows, 1)) if drafted else None
    chosen, sampled = np.arange(rows, dtype=np.int32)[::-1].copy(), np.ones(rows, np.bool_)
    filler = MaskFiller(VOCAB)
    filler._pace = dict.fromkeys((grammar._fill_each, grammar._fill_all), pace)
    found = filler(ledger(rows, drafted), chosen, sampled, parents)
    assert found is not None and 0 < filler._pace[grammar._fill_each] < 1 and bool(filler._helper._threads) == bool(pace)
    expected = []
    for row, slot in enumerate(chosen.tolist()):
        nodes = 0 if slot == 1 else (2 if slot % 3 == 0 and drafted else 1 + drafted)
        expected += [(row, node, 2 * slot + node) for node in range(nodes)]
    bits = np.unpackbits(found.bits.view(np.uint8), axis=1, bitorder="little")
    assert (bits.sum(1) == 1).all()
    assert list(zip(found.rows.tolist(), found.nodes.tolist(), bits.argmax(1).tolist(), strict=True)) == expected


@pytest.mark.parametrize("drafted", [1, 3])
def test_what_comes_without_a_choice_needs_no_mask(drafted: int) -> None:
    """All drafts but the wrong ones are the only token that may come: the mask after the last of them is left."""
    rows = 24
    chosen, parents = np.arange(rows, dtype=np.int32), np.tile(np.arange(-1, drafted - 1, dtype=np.int32), (rows, 1))
    found = MaskFiller(VOCAB)(ledger(rows, drafted, skips=True), chosen, np.ones(rows, np.bool_), parents)
    assert found is not None and found.certain is not None
    certain = [0 if slot == 1 else (1 if slot % 3 == 0 and drafted > 1 else drafted) for slot in range(rows)]
    assert found.certain.tolist() == certain
    bits = np.unpackbits(found.bits.view(np.uint8), axis=1, bitorder="little")
    told = list(zip(found.rows.tolist(), found.nodes.tolist(), bits.argmax(1).tolist(), strict=True))
    assert told == [(slot, 0, 2 * slot + certain[slot]) for slot in range(rows) if slot != 1]


def test_masks_that_were_begun_are_those_of_the_plan() -> None:
    filler, book = MaskFiller(VOCAB), ledger(8, 0)
    few = filler.begin(book, np.array([2, 5, 6], np.int32))
    assert few.all()
    begun = filler(book, np.array([2, 5, 6], np.int32), np.ones(3, np.bool_))
    some = filler(book, np.array([6, 7, 2], np.int32), np.ones(3, np.bool_))
    assert begun is not None and some is not None
    bits = [np.unpackbits(each.bits.view(np.uint8), axis=1, bitorder="little").argmax(1).tolist() for each in (begun, some)]
    assert bits == [[4, 10, 12], [12, 14, 4]]
    for slot in (2, 5, 6):
        book.slots.sequence(slot).matcher.next += 1
    filler.forget()
    again = filler(book, np.array([5], np.int32), np.ones(1, np.bool_))
    assert again is not None and np.unpackbits(again.bits.view(np.uint8), bitorder="little").argmax() == 11


def test_no_row_with_a_grammar_has_no_masks() -> None:
    assert MaskFiller(VOCAB)(ledger(2, 0), np.array([1], np.int32), np.ones(1, np.bool_)) is None
