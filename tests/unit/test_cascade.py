"""Rows of a decode step that begin with the same pages are found, with the tokens that all of them share."""

from __future__ import annotations

import numpy as np
from pagoda.serving.engine.cascade import shared_beginnings
from pagoda.serving.engine.plan import StepPlan

SIZE = 64


def plan_of(table: np.ndarray, starts: list[int], lengths: list[int] | None = None) -> StepPlan:
    rows = len(starts)
    counts = np.array(lengths or [1] * rows, np.int32)
    return StepPlan(
        step=0, slots=np.arange(rows, dtype=np.int32), starts=np.array(starts, np.int32), lengths=counts,
        token_ids=np.zeros(int(counts.sum()), np.int32), block_tables=(table.astype(np.int32),), sampled=counts > 0,
        bound=counts < 0, draws=np.zeros(rows, np.int32), admissions=(),
    )  # fmt: skip


def tables(rows: int, shared: int, own: int = 4) -> np.ndarray:
    """`shared` pages that all rows have, then pages of their own."""
    return np.concatenate([np.tile(np.arange(1, shared + 1), (rows, 1)), 100 + np.arange(rows * own).reshape(rows, own)], axis=1)


def test_all_rows_share() -> None:
    (shared,) = shared_beginnings(plan_of(tables(6, 20), [20 * SIZE + n for n in range(6)]), (SIZE,))
    assert shared is not None and shared.tolist() == [0, *[1280] * 6]


def test_strangers_are_left_out() -> None:
    table = tables(6, 20)
    table[2] = np.arange(500, 500 + table.shape[1])
    table[0] = np.arange(700, 700 + table.shape[1])
    (shared,) = shared_beginnings(plan_of(table, [1400] * 6), (SIZE,))
    assert shared is not None and shared.tolist() == [1, 0, 1280, 0, 1280, 1280, 1280]


def test_only_what_every_member_has_computed_counts() -> None:
    (shared,) = shared_beginnings(plan_of(tables(5, 20), [1279, 1400, 1400, 1400, 1400]), (SIZE,))
    assert shared is not None and shared.tolist() == [0, *[1024] * 5]


def test_too_little_is_not_worth_it() -> None:
    assert shared_beginnings(plan_of(tables(3, 20), [1400] * 3), (SIZE,)) == (None,)
    assert shared_beginnings(plan_of(tables(8, 15), [1400] * 8), (SIZE,)) == (None,)
    assert shared_beginnings(plan_of(np.zeros((8, 30)), [1400] * 8), (SIZE,)) == (None,), "page 0 is padding"
    assert shared_beginnings(plan_of(tables(6, 20), [1400] * 6, [2] * 6), (SIZE,)) == (None,), "prompts are no decodes"


def test_pages_dropped_from_a_window_end_what_is_shared() -> None:
    table = tables(6, 20)
    table[:, 17] = 0
    (shared,) = shared_beginnings(plan_of(table, [1400] * 6), (SIZE,))
    assert shared is not None and shared.tolist() == [0, *[1024] * 6]
