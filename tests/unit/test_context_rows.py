"""Contexts laid one after another: every key has its row, zeros are behind it, no tile holds two requests; prompts that gain have them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pagoda.backends.cuda.context_rows import NOTHING, ROWS, Metadata, contexts, padded, pays
from pagoda.ops.attention import AttentionFacts

FACTS = AttentionFacts("bfloat16", "bfloat16", 32, 8, 128, 128, 64, 0.1)


@given(st.lists(st.integers(0, 700), max_size=6), st.sampled_from((16, 48, 64, 128, 256)), st.integers(0, 40))
def test_every_key_has_one_row(lengths: list[int], page: int, room: int) -> None:
    width = -(-max(lengths, default=0) // page) + 1
    table = np.arange(1, len(lengths) * width + 1)
    laid = contexts(np.array(lengths, np.int32), page, width, room)
    rows: list[int | None] = []
    for entry, count in laid.parts.tolist():
        if count != NOTHING:
            rows += [int(table[entry]) * page + i if i < count else 0 for i in range(page)]
    for row, length in enumerate(lengths):
        start, end, after = laid.bounds[2 * row : 2 * row + 3].tolist()
        assert end - start == length and start % ROWS == 0 and after % page == 0 and after - end < ROWS + page * ROWS
        assert rows[start:end] == [(row * width + 1 + i // page) * page + i % page for i in range(length)]
        assert not any(rows[end:after])
    assert len(rows) == laid.bounds[-1] == padded(np.array(lengths, np.int32), page).sum()
    assert len(laid.parts) == max(room, len(rows) // page)


def step(*requests: tuple[int, int]) -> Metadata:
    queries, keys = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    return Metadata(np.concatenate([np.zeros(1, np.int32), np.cumsum(queries, dtype=np.int32)]), keys)


def test_long_prompts_gain_and_short_ones_do_not() -> None:
    assert pays(FACTS, step((4096, 4096), (4096, 4096)))
    assert pays(FACTS, step((300, 4096), (4096, 4096), (3780, 3780)))
    assert not pays(FACTS, step(*[(128, 128)] * 64))
    assert not pays(FACTS, step((512, 512)))


def test_few_queries_on_many_keys_do_not_gain() -> None:
    assert not pays(FACTS, step((16, 100_000)))
    assert pays(FACTS, step((4096, 100_000)))


def test_a_step_of_nothing_gains_nothing() -> None:
    assert not pays(FACTS, Metadata(np.zeros(3, np.int32), np.zeros(2, np.int32)))
