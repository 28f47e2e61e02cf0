"""Which images a step encodes, where their embeddings lie, and how far prompts get meanwhile."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from pagoda.hal.errors import CapacityError, RequestError
from pagoda.models.media import MediaItem, MediaPositions, Numbers
from pagoda.serving.engine.media import MediaDesk, Store, marks_of
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.slots import Slots
from pagoda.serving.engine.wire import Submit, decode_to_engine, encode


def request(name: str, *items: tuple[bytes, int, int], length: int = 40) -> EngineRequest:
    media = tuple(MediaItem("image", digest, offset, size) for digest, offset, size in items)
    return EngineRequest(name, tuple(range(length)), SamplingParams(), media=media)


def desk(rows: int = 20, per_step: int = 12, whole: bool = False, *live: EngineRequest) -> MediaDesk:
    slots = Slots(4, 64)
    for one in live:
        slots.take(SimpleNamespace(request=SimpleNamespace(grammar=None, source=one, params=one.params), tokens=np.arange(40), limit=50), 0)
    return MediaDesk(Store(rows, per_step, whole), slots)


def step(made: MediaDesk, *rows: tuple[int, int, int]) -> tuple[list[int], int, list[int], list[int]]:
    """Wanted (slot, start, count) → counts given, jobs, rows and sources of the plan."""
    slots, starts, want = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    given = made.clip_running(slots, starts, want.copy())
    kept = given > 0
    plan = made.plan(slots[kept], starts[kept], given[kept])
    if plan is None:
        return given.tolist(), 0, [], []
    return given.tolist(), len(plan.jobs), plan.rows.tolist(), plan.sources.tolist()


def test_a_chunk_may_end_within_an_image_which_is_encoded_once() -> None:
    made = desk(20, 12, False, request("a", (b"x", 4, 8)))
    assert step(made, (0, 0, 6)) == ([6], 1, [4, 5], [0, 1])
    assert step(made, (0, 6, 10)) == ([10], 0, [0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7])
    assert step(made, (0, 16, 4)) == ([4], 0, [], [])


def test_a_step_encodes_no_more_than_its_budget_and_others_go_on() -> None:
    a, b, text = request("a", (b"x", 2, 8)), request("b", (b"y", 2, 8)), request("c")
    made = desk(20, 12, False, a, b, text)
    counts, jobs, rows, _ = step(made, (0, 0, 12), (1, 0, 12), (2, 0, 12))
    assert (counts, jobs, rows) == ([12, 2, 12], 1, list(range(2, 10)))
    assert step(made, (1, 2, 10))[:2] == ([10], 1)
    assert desk(20, 4, False, a).clip(a, 0, 12) == 12  # alone, one that is larger than the budget


def test_while_others_decode_a_step_encodes_one_image() -> None:
    a, b, text = request("a", (b"x", 2, 3), (b"z", 20, 3)), request("b", (b"y", 2, 3)), request("c")
    made = desk(20, 12, False, a, b, text)
    made.slots.total[2] = 41  # one token beyond its prompt
    assert step(made, (0, 0, 30), (1, 0, 12), (2, 40, 1))[:2] == ([20, 2, 1], 1)
    assert step(made, (0, 20, 10), (1, 2, 10), (2, 41, 1))[:2] == ([10, 0, 1], 1)
    made.slots.active[2] = False  # nobody waits for a token
    assert step(made, (1, 2, 10))[:2] == ([10], 1)
    both = desk(20, 12, False, a, b)
    assert step(both, (0, 0, 30), (1, 0, 12))[:2] == ([30, 12], 3)


def test_the_same_image_of_two_requests_is_encoded_once_and_what_was_used_last_stays() -> None:
    a, b, c = request("a", (b"x", 0, 8)), request("b", (b"x", 3, 8)), request("c", (b"y", 0, 8), (b"z", 20, 8))
    made = desk(20, 40, False, a, b, c)
    assert step(made, (0, 0, 8), (1, 0, 11))[1:] == (1, [*range(8), *range(11, 19)], [*range(8), *range(8)])
    assert step(made, (2, 0, 10))[1] == 1
    assert step(made, (0, 0, 8))[1] == 0
    assert step(made, (2, 10, 30))[1] == 1  # z takes the place of y
    assert step(made, (0, 0, 8))[1] == 0 and step(made, (2, 0, 10))[1] == 1


def test_a_step_never_takes_the_place_of_what_it_needs() -> None:
    made = desk(20, 40, False, request("a", (b"x", 0, 8)), request("b", (b"y", 0, 8)), request("c", (b"z", 5, 8)))
    assert step(made, (0, 0, 8), (1, 0, 8), (2, 0, 13))[:2] == ([8, 8, 5], 2)


def test_images_that_see_both_ways_are_not_cut() -> None:
    one = request("a", (b"x", 4, 8))
    made = desk(20, 12, True, one)
    assert [made.clip(one, 0, count) for count in (3, 6, 11, 12, 20)] == [3, 4, 4, 12, 20]
    assert made.clip(one, 4, 7) == 0


def test_what_cannot_be_is_refused() -> None:
    made = desk(20, 12, True)
    with pytest.raises(RequestError, match="tokens 4 to 44, of 40"):
        made.check(request("a", (b"x", 4, 40)), 64)
    with pytest.raises(RequestError, match="tokens 6 to 10"):
        made.check(request("a", (b"x", 4, 4), (b"y", 6, 4)), 64)
    with pytest.raises(CapacityError, match="25 tokens is larger than the 20"):
        made.check(request("a", (b"x", 4, 25)), 64)
    with pytest.raises(RequestError, match=r"shape \(4, 40\) .* takes \(1, 40\)"):
        made.check(replace(request("a"), positions=MediaPositions(Numbers("int64", (4, 40), b""), 0)), 64)
    made.check(request("a", (b"x", 4, 8), (b"y", 12, 4)), 64)


def test_units_of_the_chain_depend_on_the_images_that_reach_into_them() -> None:
    items = request("a", (b"x", 6, 4), (b"y", 12, 2)).media
    marks = marks_of(items, 8)
    assert set(marks) == {0, 1} and marks[0].startswith(b"x") and b"y" in marks[1] and b"x" in marks[1]
    assert marks_of(request("a", (b"x", 7, 4)).media, 8)[0] != marks[0]


def test_items_cross_to_an_engine_process() -> None:
    tensors = {"pixel_values": Numbers("float32", (1, 2), b"\0" * 8)}
    item = MediaItem("image", b"x", 4, 8, tensors)
    positions = MediaPositions(Numbers("int64", (3, 1), b"\0" * 24), -2)
    sent = replace(request("a"), media=(item,), positions=positions)
    assert decode_to_engine(encode(Submit(sent))).request == sent
