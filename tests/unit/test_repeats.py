"""Answers that repeat themselves end at the first token that makes it so, however they come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from assembled import both
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.params import RepetitionDetection
from pagoda.serving.frontend.repeats import Repeats
from patience import eventually
from scripted import Scripted, text_side
from toy_server import toy_server


def first_repeat(tokens: list[int], asked: RepetitionDetection) -> int | None:
    """By looking at every ending anew."""
    for end in range(1, len(tokens) + 1):
        for length in range(asked.min_pattern_size, asked.max_pattern_size + 1):
            tail = tokens[max(0, end - length * asked.min_count) : end]
            if len(tail) == length * asked.min_count and tail == tail[:length] * asked.min_count:
                return end
    return None


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 5)), max_size=8),
    low=st.integers(1, 4),
    more=st.integers(0, 4),
    count=st.integers(2, 5),
)
def test_the_first_token_that_completes_a_repeat_is_found(pieces: list[tuple[list[int], int]], low: int, more: int, count: int) -> None:
    asked = RepetitionDetection(low + more, count, low)
    tokens = [token for pattern, times in pieces for token in pattern * times]
    seen = Repeats(asked)
    found = next((place for place, token in enumerate(tokens, 1) if seen.push(token)), None)
    assert found == first_repeat(tokens, asked)


SAID = "Once abcabcabcabcabc and more"
ASKED = {"max_pattern_size": 5, "min_count": 3}


@pytest.mark.parametrize("burst", [1, 2, 7, 100])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_on_every_endpoint_whole_and_streamed(path: str, burst: int) -> None:
    said = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}}.get(path, {"messages": [{"role": "user", "content": "x"}]})

    async def ask() -> tuple[list[Any], int]:
        async with toy_server(Scripted(SAID, burst, FinishReason.LENGTH), text=text_side("{{ messages[0].content }}")) as toy:
            told: list[Any] = []
            for more in ({"repetition_detection": ASKED}, {"repetition_detection": ASKED, "stop": "abcab"}, {}):
                whole, streamed = await both(toy.http, path, {**said, **more})
                assert whole == streamed
                told.append(whole)
            await eventually(lambda: not toy.engine.live)
            return told, len(toy.engine.aborted)

    told, aborted = asyncio.run(ask())
    assert "Once abcabcabc" in str(told[0]) and "abcabcabca" not in str(told[0])
    if path != "/v1/responses":
        assert "'finish_reason': 'repetition'" in str(told[0]) and "'finish_reason': 'stop'" in str(told[1])
    assert "Once '" in str(told[1]) and SAID in str(told[2])
    assert aborted or burst == 100


@pytest.mark.parametrize(
    "wrong",
    [{"max_pattern_size": -1, "min_count": 2}, {"max_pattern_size": 3}, {"max_pattern_size": 3, "min_count": 1}, {"size": 3},
     {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, {"max_pattern_size": "2", "min_count": 2}],
)  # fmt: skip
async def test_what_is_wrong_is_named(wrong: dict[str, Any]) -> None:
    async with toy_server() as toy:
        answer = await toy.complete(repetition_detection=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_detection")
        assert (await toy.complete(repetition_detection={"max_pattern_size": 0})).status_code == 200
