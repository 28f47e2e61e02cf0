"""The step buffer: every section round-trips through one copy, padding is harmless, optional columns appear only when used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.hal.discovery import find
from pagoda.serving.engine.batch import BatchPacker, Bucket, StepBatch
from pagoda.serving.engine.layout import ALIGNMENT, HEADER_WORDS, SECTIONS, read_header
from pagoda.serving.engine.packed import host_views
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import ON_DEVICE, Admission, StepPlan
from pagoda.serving.engine.rare_columns import Extras
from pagoda.serving.engine.settings import SamplingSlots, Use

SIZES = (4, 8)


def make_plan(starts: list[int], lengths: list[int], sampled: list[bool] | None = None, **rest: Any) -> StepPlan:
    rows, tokens, random = len(starts), sum(lengths), np.random.default_rng(3)
    widths = [max(-(-(start + length) // size) for start, length in zip(starts, lengths)) for size in SIZES]
    return StepPlan(
        step=0,
        slots=random.permutation(rows + 2)[:rows].astype(np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        token_ids=random.integers(0, 90, tokens).astype(np.int32),
        block_tables=tuple(random.integers(1, 500, (rows, width)).astype(np.int32) for width in widths),
        sampled=np.array(sampled if sampled is not None else [True] * rows),
        bound=np.zeros(rows, bool),
        draws=np.arange(rows, dtype=np.int32) + 5,
        **rest,
    )


def packer(slots: SamplingSlots | None = None, capacity: int = 1 << 14, every_mask: bool = False) -> BatchPacker:
    return BatchPacker(find("cpu").open(), SIZES, slots or SamplingSlots(64, 97), capacity, 2, every_mask=every_mask)


def admitted(plan: StepPlan, *params: SamplingParams) -> SamplingSlots:
    slots = SamplingSlots(64, 97)
    for slot, one in zip(plan.slots, params):
        slots.admit(Admission(int(slot), one, (1, 2, 3), eos_ids=(9,)))
    return slots


def lists(batch: StepBatch, name: str) -> Any:
    return batch.views[name].tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9), st.booleans()), min_size=1, max_size=12))
def test_segments_match_a_loop_over_tokens(rows: list[tuple[int, int, bool]]) -> None:
    plan = make_plan(*map(list, zip(*rows)))  # type: ignore[arg-type]
    batch = packer().pack(plan)
    positions, slots, kv = [], [], [[], []]
    for row, (start, length, _) in enumerate(rows):
        for position in range(start, start + length):
            positions.append(position)
            slots.append(int(plan.slots[row]))
            for group, size in enumerate(SIZES):
                kv[group].append(int(plan.block_tables[group][row, position // size]) * size + position % size)  # type: ignore[attr-defined]
    assert lists(batch, "positions") == [positions]
    assert lists(batch, "token_slots") == slots
    assert lists(batch, "kv_slots") == kv
    assert lists(batch, "query_start") == [0, *np.cumsum(plan.lengths).tolist()]
    assert lists(batch, "seq_lens") == [start + length for start, length, _ in rows]
    ends = [int(end) - 1 for end, (_, _, yes) in zip(np.cumsum(plan.lengths), rows) if yes]
    assert (lists(batch, "sample_rows") if ends else []) == ends
    assert lists(batch, "token_ids") == plan.token_ids.tolist()
    assert batch.max_query == max(plan.lengths) and batch.max_seq == max(lists(batch, "seq_lens"))


def test_one_buffer_describes_itself() -> None:
    plan = make_plan([3, 9, 1], [4, 1, 1])
    made = packer(admitted(plan, SamplingParams(seed=4), SamplingParams(temperature=0)))
    batch = made.pack(plan)
    raw = made._device.numpy()
    layout = read_header(raw[: HEADER_WORDS * 8].view(np.int64))
    assert layout == batch.layout and raw.view(np.int64)[2:4].tolist() == [6, 3]
    ends = 0
    for name, section in layout.sections.items():
        assert section.offset % ALIGNMENT == 0 and section.offset >= ends
        ends = section.offset + section.nbytes
        np.testing.assert_array_equal(host_views(raw, layout)[name], batch.views[name].numpy())
        assert batch.views[name].untyped_storage().data_ptr() == made._device.untyped_storage().data_ptr()
    assert ends == layout.nbytes
    raw.view(np.int64)[0] = 99
    with pytest.raises(ValueError, match="version 99"):
        read_header(raw[: HEADER_WORDS * 8].view(np.int64))


def test_greedy_steps_carry_no_sampling_columns() -> None:
    plan = make_plan([3, 9], [1, 1])
    batch = packer(admitted(plan, SamplingParams(temperature=0), SamplingParams(temperature=0))).pack(plan)
    expected = {
        "positions", "kv_slots", "sample_rows", "sample_slots", "token_ids", "token_slots", "query_start", "seq_lens", "shared",
        "table0", "table1",
    }  # fmt: skip
    assert set(batch.views) == expected and batch.use == 0 and batch.uniform


def test_sampling_columns_follow_the_sampled_rows() -> None:
    plan = make_plan([0, 7, 9], [5, 1, 1], [False, True, True])
    warm = [SamplingParams(temperature=0.5 + i, top_p=0.9 - i / 10, top_k=3 + i, min_p=i / 10, seed=10 + i) for i in range(3)]
    batch = packer(admitted(plan, *warm)).pack(plan)
    np.testing.assert_allclose(lists(batch, "temperature"), [1.5, 2.5])
    np.testing.assert_allclose(lists(batch, "top_p"), [0.8, 0.7], rtol=1e-6)
    np.testing.assert_allclose(lists(batch, "min_p"), [0.1, 0.2], rtol=1e-6)
    assert lists(batch, "top_k") == [4, 5] and lists(batch, "seed") == [11, 12] and lists(batch, "draws") == [6, 7]
    assert lists(batch, "sample_slots") == plan.slots[1:].tolist()


def test_padded_decode_rows_write_page_zero() -> None:
    plan = make_plan([3, 9, 5], [1, 1, 1])
    batch = packer().pack(plan, Bucket(8, 8))
    assert lists(batch, "query_start") == list(range(9))
    assert lists(batch, "seq_lens") == [4, 10, 6, 1, 1, 1, 1, 1]
    assert all(0 <= slot < 4 for slot in lists(batch, "kv_slots")[0][3:]) and lists(batch, "token_ids")[3:] == [0] * 5
    assert batch.views["table0"][3:].abs().sum() == 0
    assert lists(batch, "sample_slots")[3:] == [64] * 5 and (batch.num_rows, batch.num_tokens, batch.num_samples) == (3, 3, 3)


def test_padded_mixed_steps_leave_spare_tokens_to_no_row() -> None:
    plan = make_plan([0, 9], [5, 1])
    batch = packer().pack(plan, Bucket(16, 4))
    assert lists(batch, "query_start") == [0, 5, 6, 6, 6] and lists(batch, "seq_lens") == [5, 10, 0, 0]
    assert lists(batch, "kv_slots")[0][6:] == [0] * 10 and len(lists(batch, "token_ids")) == 16


def test_stable_addresses_for_equal_buckets() -> None:
    made = packer()
    first = made.pack(make_plan([3, 9], [1, 1]), Bucket(4, 4))
    second = made.pack(make_plan([35, 9, 8], [1, 1, 1]), Bucket(4, 4))
    for name in ("token_ids", "positions", "kv_slots", "seq_lens", "query_start", "sample_rows", "sample_slots"):
        assert first.views[name].data_ptr() == second.views[name].data_ptr()


def test_buffers_grow_and_say_so() -> None:
    made = packer(capacity=2000)
    before = made.generation
    plan = make_plan([0], [900])
    batch = made.pack(plan)
    assert made.generation == before + 1 and lists(batch, "token_ids") == plan.token_ids.tolist()


def test_values_on_the_device_are_marked() -> None:
    plan = make_plan([3], [1])
    plan.token_ids[0] = ON_DEVICE
    assert lists(packer().pack(plan), "token_ids") == [ON_DEVICE]


# One test for each optional column: it is there when asked for, reads back what was put in, and is absent otherwise.

OPTIONAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "adapters": ({"adapters": np.array([2, -1], np.int32)}, {}, {"adapters": [2, 2, 2, 2, 2, -1]}),
    "positions": ({}, {"positions": np.arange(18).reshape(3, 6)}, {"positions": np.arange(18).reshape(3, 6).tolist()}),
    "spans": (
        {},
        {"span_rows": np.array([1, 2, 4]), "span_sources": np.array([70, 71, 5])},
        {"span_rows": [1, 2, 4], "span_sources": [70, 71, 5]},
    ),
    "drafts": (
        {"drafts": np.array([[5, 6], [-1, -1]], np.int32), "parents": np.array([[-1, 0], [-1, -1]], np.int32)},
        {},
        {"drafts": [[5, 6], [-1, -1]], "parents": [[-1, 0], [-1, -1]]},
    ),
    "tree": (
        {"drafts": np.array([[5, 6, 7], [-1, -1, -1]], np.int32), "parents": np.array([[-1, -1, 1], [-1, -1, -1]], np.int32)},
        {},
        {
            "drafts": [[5, 6, 7], [-1, -1, -1]],
            "parents": [[-1, -1, 1], [-1, -1, -1]],
            "tree_nodes": [3, 0],
            "tree_seen": [-1, -1, 1, 2, 6, -1],
        },
    ),
    "grammar": (
        {"masks": np.array([[1, 2, 3, 4]], np.int32), "mask_rows": np.array([1], np.int32)},
        {},
        {"mask_rows": [1], "masks": [[1, 2, 3, 4]]},
    ),
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_column(name: str) -> None:
    of_plan, extras, expected = OPTIONAL[name]
    batch = packer().pack(make_plan([0, 9], [5, 1], **of_plan), extras=Extras(**extras))
    assert {column: lists(batch, column) for column in expected} == expected
    if name != "positions":
        plain = packer().pack(make_plan([0, 9], [5, 1]))
        assert set(batch.views) - set(plain.views) == set(expected)


def test_a_trees_drafts_have_the_positions_of_their_depth_and_places_of_their_own() -> None:
    batch = packer().pack(make_plan([0, 9], [5, 1], **OPTIONAL["tree"][0]))
    assert lists(batch, "positions") == [[0, 1, 2, 2, 3, 9]]
    assert len(set(lists(batch, "kv_slots")[0])) == 6
    assert lists(batch, "sample_rows") == [1, 2, 3, 4, 5] and batch.samples.depths.tolist() == [0, 1, 1, 2, 0]


def test_masks_of_rows_that_are_not_sampled_are_dropped() -> None:
    masks = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    plan = make_plan([0, 9], [5, 1], [False, True], masks=masks, mask_rows=np.array([0, 1], np.int32))
    batch = packer().pack(plan)
    assert lists(batch, "mask_rows") == [0] and lists(batch, "masks") == [[5, 6, 7, 8]]
    assert batch.use & Use.ALLOWED  # or a captured step of the same shape would be replayed without masks


def test_where_every_row_has_a_mask_those_without_one_allow_all() -> None:
    """Rows that pad too; and a step without masks has none. Wherever the tables end, a captured step finds the masks at the same place."""
    offsets = set()
    for start in (3, 40):
        plan = make_plan([start, 9], [1, 1], masks=np.array([[5, 6, 7, 8]], np.int32), mask_rows=np.array([1], np.int32))
        batch = packer(every_mask=True).pack(plan, Bucket(4, 4))
        assert lists(batch, "masks") == [[-1] * 4, [5, 6, 7, 8], [-1] * 4, [-1] * 4]
        offsets.add(batch.layout.sections["masks"].offset)
    assert len(offsets) == 1
    assert "masks" not in packer(every_mask=True).pack(make_plan([3, 9], [1, 1])).views
    two = np.array([0, 1], np.int32)
    drafted = make_plan([0, 9], [3, 1], **OPTIONAL["drafts"][0], masks=np.ones((2, 4), np.int32), mask_rows=two, mask_nodes=1 - two)
    assert [line[0] for line in lists(packer(every_mask=True).pack(drafted), "masks")] == [-1, 1, -1, 1]


def test_allowed_ids_join_a_grammars_mask() -> None:
    masks = np.full((1, 4), -1, np.int32)
    masks[0, 0] = 0b0110
    plan = make_plan([3, 9], [1, 1], masks=masks, mask_rows=np.array([1], np.int32))
    slots = admitted(plan, SamplingParams(allowed_token_ids=(0, 40)), SamplingParams(allowed_token_ids=(1, 3)))
    batch = packer(slots).pack(plan)
    assert lists(batch, "mask_rows") == [0, 1] and lists(batch, "masks") == [[1, 1 << 8, 0, 0], [0b0010, 0, 0, 0]]


def test_rare_sampling_columns_hold_only_the_rows_that_want_them() -> None:
    plan = make_plan([3, 9, 4], [1, 1, 1])
    plain, penal = SamplingParams(), SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.25)
    slots = admitted(plan, plain, penal, SamplingParams(logit_bias={4: 2.0}, min_tokens=9, max_tokens=20, logprobs=3))
    batch = packer(slots).pack(plan)
    assert lists(batch, "penalty_rows") == [1] and lists(batch, "presence") == [1.5] and lists(batch, "repetition") == [1.25]
    assert lists(batch, "edit_rows") == [2, 2] and lists(batch, "edit_ids") == [4, 9]
    assert lists(batch, "edit_values") == [2.0, float("-inf")] and lists(batch, "logprob_rows") == [2] and batch.top_logprobs == 3


def test_every_section_is_listed_once() -> None:
    names = [name for name, _, _ in SECTIONS]
    assert len(set(names)) == len(names) and torch.int64.itemsize == 8
