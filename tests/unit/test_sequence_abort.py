"""One of a request's sequences ends alone: in the scheduler's books, in the engine's loop, and from a stop string in a text."""

from __future__ import annotations

from functools import partial

import pytest
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.service import ModelCard, Service
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.frontend.processor import Processor
from pagoda.serving.frontend.session import Session
from pagoda.serving.frontend.text import TextFrontend
from scheduler_toy import Toy, expected_tokens, toy_facts
from slow_steps import HandBrake, slow_engine
from toy import toy_engine, toy_request
from toy_engine import ToyTemplate, ToyTokenizer


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_its_pages_are_free_within_a_step_and_the_others_go_on(overlap: int) -> None:
    toy = Toy(toy_facts(num_pages=60, overlap=overlap))
    toy.submit("a", range(9), n=3, max_tokens=30, temperature=1.0, ignore_eos=True)
    for _ in range(10):
        toy.step()
    before = toy.scheduler.stats()
    slot = toy.scheduler._ledger.requests["a"].sequences[1].slot
    table = toy.scheduler._ledger.tables.tables[0][slot]
    own = [page for page in table[table > 0].tolist() if toy.scheduler._ledger.pool.references([page])[0] == 1]
    assert own
    toy.hear(toy.scheduler.abort_sequence("a", 1))
    while toy.ranks.in_flight:
        toy.commit()
    after = toy.scheduler.stats()
    assert (after.running, after.pages_used) == (before.running - 1, before.pages_used - len(own))
    toy.drain()
    for index in (0, 2):
        assert (toy.tokens["a"][index], toy.reasons["a"][index]) == expected_tokens(toy.requests["a"], 64, index)
    assert toy.reasons["a"][1] is FinishReason.ABORT and len(toy.tokens["a"][1]) < 30


@pytest.mark.parametrize("ended", [[0], [0, 1, 2], [1, 2]])
def test_sequences_that_wait_for_their_sibling_end_too(ended: list[int]) -> None:
    toy = Toy(max_num_batched_tokens=4)
    toy.submit("a", range(12), n=3, max_tokens=6, temperature=1.0, ignore_eos=True)
    toy.step()
    for index in ended:
        toy.hear(toy.scheduler.abort_sequence("a", index))
    toy.drain()
    assert toy.ended == ["a"] and not toy.scheduler.has_work
    for index in {0, 1, 2} - set(ended):
        assert (toy.tokens["a"][index], toy.reasons["a"][index]) == expected_tokens(toy.requests["a"], 64, index)


def test_unknown_ones_and_beams_are_ignored() -> None:
    toy = Toy()
    toy.submit("beams", range(5), n=2, max_tokens=5, request={"beam_width": 2})
    toy.submit("a", range(5), max_tokens=3)
    toy.step()
    assert [toy.scheduler.abort_sequence(*one) for one in (("x", 0), ("a", 7), ("beams", 0))] == [[], [], []]
    toy.drain()
    toy.check_tokens("a")


class Words(ToyTokenizer):
    """Token i is the character 33 + i, for the ids of the toy model."""

    vocab_size = 97
    eos_ids = (1,)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(33 + token_id).encode()

    def detokenizer(self, **_: object) -> Words:  # type: ignore[override]
        return self

    def push(self, token_ids: object) -> str:
        return "".join(chr(33 + int(token)) for token in token_ids)  # type: ignore[attr-defined]

    def flush(self) -> str:
        return ""


class Watched:
    """A client that notes what is aborted, and then lets the engine go on."""

    def __init__(self, client: InProcessClient, brake: HandBrake) -> None:
        self._client, self._brake, self.aborted, self.facts = client, brake, [], client.facts

    def generate(self, *arguments: object, **more: object) -> object:
        return self._client.generate(*arguments, **more)  # type: ignore[arg-type]

    async def abort(self, ids: list[str], sequence: int | None = None) -> None:
        self.aborted.append((ids, sequence))
        await self._client.abort(ids, sequence)
        self._brake.release()


@pytest.mark.parametrize("way", ["session", "service"])
async def test_a_stop_string_ends_its_sequence_alone(way: str) -> None:
    brake = HandBrake()
    brake.release()
    client = await InProcessClient.start(partial(slow_engine, toy_engine, brake))
    plain = toy_request("plain", [5, 17, 80], 24, temperature=1.0, seed=5, n=3)
    truth: dict[int, list[int]] = {}
    async for delta in client.generate(plain):
        for part in delta.sequences:
            truth.setdefault(part.index, []).extend(part.token_ids)
    text = {index: "".join(chr(33 + token) for token in tokens) for index, tokens in truth.items()}
    stop = next(word for at in range(3, 9) if (word := text[1][at : at + 2]) not in text[0] + "|" + text[2])
    brake.put_on()
    watched, front = Watched(client, brake), TextFrontend(Words(), ToyTemplate())
    request = toy_request("stopped", [5, 17, 80], 24, temperature=1.0, seed=5, n=3, stop=(stop,))
    before = await client.stats()
    if way == "session":
        output = await Session(watched, Processor(front, client.facts)).complete(request)  # type: ignore[arg-type]
        answers = {answer.index: (answer.text, answer.finish_reason) for answer in output.outputs}
    else:
        service = Service(watched, front, ModelCard(("toy",), "toy"), ServerConfig())  # type: ignore[arg-type]
        answers = dict.fromkeys(range(3), ("", ""))
        async for step in service.generate(request):
            for part in step.deltas:
                answers[part.index] = (answers[part.index][0] + part.text, part.finish_reason or "")
        service.close()
    generated = (await client.stats()).generation_tokens - before.generation_tokens
    await client.close()
    assert watched.aborted == [(["stopped"], 1)]
    assert answers == {0: (text[0], "length"), 1: (text[1].partition(stop)[0], "stop"), 2: (text[2], "length")}
    assert generated < 3 * 24
