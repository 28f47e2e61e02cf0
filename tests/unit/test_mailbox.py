"""A reader that keeps up gets every delta as it came; one that does not gets the same content in fewer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagoda.hal.errors import EngineDeadError, RequestError
from pagoda.serving.engine.mailbox import Mailbox, Piece, merge
from pagoda.serving.engine.messages import FinishReason, RequestDelta, SequenceDelta, StepDeltas, TokenLogprobs
from pagoda.serving.engine.streams import Streams
from toy import toy_request


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, (), ())


def delta(index: int, *tokens: int, **facts: object) -> RequestDelta:
    return RequestDelta("a", (SequenceDelta(index, tokens, tuple(map(scored, tokens))),), **facts)  # type: ignore[arg-type]


def put(box: Mailbox, piece: Piece) -> None:
    box.add_token(piece) if isinstance(piece, int) else box.add(piece)
    box.settle()


pieces = st.one_of(st.integers(0, 9), st.builds(delta, st.just(0), st.integers(0, 9), st.integers(0, 9)))


@given(st.lists(pieces, min_size=1, max_size=8), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_any_grouping_has_the_same_tokens(whole: list[Piece], cuts: list[int]) -> None:
    def tokens(deltas: list[RequestDelta]) -> list[int]:
        return [token for one in deltas for part in one.sequences for token in part.token_ids]

    grouped, at = [], 0
    for cut in cuts:
        if whole[at : at + cut]:
            grouped.append(merge("a", whole[at : at + cut]))
        at += cut
    assert tokens(grouped) == tokens([merge("a", [piece]) for piece in whole][: at or None])


def test_what_is_said_once_is_kept_and_ends_are_the_last() -> None:
    first = replace(delta(0, 5), cached_tokens=16, prompt_logprobs=(scored(1),))
    last = RequestDelta(
        "a", (SequenceDelta(0, (7,), (scored(7),), FinishReason.STOP, 7), SequenceDelta(1, (), None, FinishReason.ABORT)), True
    )
    merged = merge("a", [first, delta(1, 8), last])
    assert (merged.cached_tokens, merged.prompt_logprobs, merged.finished) == (16, (scored(1),), True)
    zero, one = merged.sequences
    assert zero == SequenceDelta(0, (5, 7), (scored(5), scored(7)), FinishReason.STOP, 7)
    assert (one.token_ids, one.finish_reason, one.logprobs) == ((8,), FinishReason.ABORT, (scored(8),))
    failed = merge("a", [3, RequestDelta("a", (SequenceDelta(0, (), finish_reason=FinishReason.ERROR),), True, error="why")])
    assert failed.error == "why" and failed.sequences[0].token_ids == (3,) and failed.sequences[0].finish_reason is FinishReason.ERROR


async def test_a_reader_that_keeps_up_gets_each_and_waits_in_between() -> None:
    box, got = Mailbox("a"), []

    async def read() -> None:
        for _ in range(3):
            got.append((await box.take()).sequences[0].token_ids)

    reader = asyncio.create_task(read())
    for token in range(3):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        put(box, token)
    await reader
    assert got == [(0,), (1,), (2,)]
    put(box, 3)
    put(box, 4)
    assert (await box.take()).sequences[0].token_ids == (3, 4)
    put(box, 5)
    box.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await box.take()


async def test_a_patient_reader_is_woken_for_the_first_delta_for_enough_and_for_ends() -> None:
    box = Mailbox("a", patience=4)
    put(box, delta(0, 9))
    assert (await box.take()).sequences[0].token_ids == (9,)
    reading = asyncio.create_task(box.take())
    for piece in (5, delta(0, 6), 7):
        put(box, piece)
        await asyncio.sleep(0)
        assert not reading.done()
    put(box, 8)
    assert (await reading).sequences[0].token_ids == (5, 6, 7, 8)
    reading = asyncio.create_task(box.take())
    for token in (1, 2):
        put(box, token)
        await asyncio.sleep(0)
        assert not reading.done()
    put(box, delta(0, 3, finished=True))
    taken = await reading
    assert (taken.sequences[0].token_ids, taken.finished) == ((1, 2, 3), True)
    put(box, 4)
    box.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await box.take()


async def test_enough_plain_tokens_go_the_short_way_together() -> None:
    went: list[list[int]] = []
    box = Mailbox("a", 3, lambda token_ids: went.append([*token_ids]) or True)
    put(box, delta(0, 9))
    await box.take()
    reading = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    for token in range(7):
        put(box, token)
    put(box, delta(0, 7, finished=True))
    assert went == [[0, 1, 2], [3, 4, 5]]
    assert (await reading).sequences[0].token_ids == (6, 7)


async def test_streams_route_reject_abort_and_fail() -> None:
    streams, submitted, aborted = Streams(), [], []
    one, two, three = (streams.generate(toy_request(name, [3]), submitted.append, aborted.extend) for name in "abc")
    waits = [asyncio.create_task(anext(stream)) for stream in (one, two, three)]
    await asyncio.sleep(0)
    assert [request.request_id for request in submitted] == ["a", "b", "c"]
    with pytest.raises(RequestError, match="already running"):
        await anext(streams.generate(toy_request("a", [3]), submitted.append, aborted.extend))
    streams.deliver(StepDeltas(["a", "gone"], [4, 5], [RequestDelta("b", (), finished=True), RequestDelta("gone", ())]))
    streams.reject("c", RequestError("too long", param="prompt"))
    assert (await waits[0]).sequences[0].token_ids == (4,) and (await waits[1]).finished
    with pytest.raises(RequestError, match="too long"):
        await waits[2]
    assert [item async for item in two] == [] and aborted == []
    await one.aclose()
    assert aborted == ["a"]
    last = streams.generate(toy_request("d", [3]), submitted.append, aborted.extend)
    wait = asyncio.create_task(anext(last))
    await asyncio.sleep(0)
    streams.fail(EngineDeadError("killed"))
    streams.fail(EngineDeadError("later"))
    with pytest.raises(EngineDeadError, match="killed"):
        await wait
    with pytest.raises(EngineDeadError, match="killed"):
        await anext(streams.generate(toy_request("e", [3]), submitted.append, aborted.extend))
    assert aborted == ["a"]


class Taker:
    """Takes plain tokens while it likes."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.likes = True

    def __call__(self, token_ids: Sequence[int]) -> bool:
        if self.likes:
            self.taken += token_ids
        return self.likes


async def test_plain_tokens_are_offered_while_the_reader_waits_and_nothing_else_comes() -> None:
    take, streams = Taker(), Streams()
    reading = streams.generate(toy_request("a", [3]), lambda one: None, lambda ids: None, plain=take)
    got: list[tuple[int, ...]] = []

    async def read() -> None:
        async for delta in reading:
            got.append(delta.sequences[0].token_ids)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    streams.deliver(StepDeltas(["a"], [1]), StepDeltas(["a"], [2]))
    streams.deliver(StepDeltas(["a"], [3]))
    assert (take.taken, got) == ([1, 2, 3], [])
    take.likes = False
    streams.deliver(StepDeltas(["a"], [4]))
    take.likes = True
    streams.deliver(StepDeltas(["a"], [5]))  # the reader was woken for what was refused, and gets this too
    await asyncio.sleep(0)
    streams.deliver(StepDeltas(["a"], [6]), StepDeltas(others=[RequestDelta("a", (SequenceDelta(0, (7,)),), finished=True)]))
    await reader
    assert (take.taken, got) == ([1, 2, 3], [(4, 5), (6, 7)])


async def test_who_fails_with_its_tokens_fails_alone() -> None:
    def broken(token_ids: Sequence[int]) -> bool:
        raise KeyError(token_ids[0])

    take, streams, left = Taker(), Streams(), []
    first = streams.generate(toy_request("a", [3]), lambda one: None, left.extend, plain=broken)
    second = streams.generate(toy_request("b", [3]), lambda one: None, left.extend, plain=take)
    waits = [asyncio.create_task(anext(stream)) for stream in (first, second)]
    await asyncio.sleep(0)
    streams.deliver(StepDeltas(["a", "b"], [4, 5]))
    with pytest.raises(KeyError, match="4"):
        await waits[0]
    assert take.taken == [5] and left == ["a"]
    waits[1].cancel()
