"""A request that is aborted in each state it can be in is told so, leaves no page behind and disturbs nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pagoda.serving.engine.messages import FinishReason
from pagoda.serving.engine.sequence import State
from pagoda.serving.engine.transfer.store import StoreConnector
from scheduler_toy import Toy, toy_facts, toy_store

GATES = (State.WAITING_GRAMMAR, State.WAITING_ENCODER)


class Slow(StoreConnector):
    """Ends loads some polls later."""

    polls = 0

    def done(self):
        self.polls += 1
        return super().done() if self.polls % 4 == 0 else ()


def life(toy: Toy) -> Iterator[None]:
    """Requests that between them come into every state: what others have cached goes to the store and comes back, pages are few, one
    request answers three times, two wait for something. Yields wherever a client's abort may come."""
    for turn in range(3):
        for number in range(6):
            begin = 5 * (number % 3)
            toy.submit(f"{turn} {number}", range(begin, begin + 18), max_tokens=16, ignore_eos=True)
            yield
        toy.submit(f"{turn} three", range(9), n=3, temperature=1.0, max_tokens=10, ignore_eos=True)
        for gate in GATES:
            toy.submit(f"{turn} {gate.value}", range(7), max_tokens=4, ignore_eos=True, gates=(gate,))
        for _ in range(400):
            yield
            while toy.plan() is not None:
                yield
            for gate in GATES:
                toy.scheduler.open_gate(f"{turn} {gate.value}", gate)
            if toy.ranks.in_flight:
                toy.commit()
            if not toy.scheduler.has_work:
                break


@pytest.mark.parametrize("state", [state for state in State if state is not State.FINISHED])
@pytest.mark.parametrize("overlap", [1, 3])
def test_an_abort_in_each_state(state: State, overlap: int) -> None:
    if state is State.PREEMPTING and overlap == 1:
        overlap = 2  # a step in flight must still write the pages of what is preempted
    toy = Toy(toy_facts(num_pages=30, max_model_len=40, overlap=overlap), lambda read, write: toy_store(64, read, write, Slow))
    aborted: list[str] = []
    for _ in life(toy):
        found = [
            name
            for name, request in toy.scheduler._ledger.requests.items()
            if len(aborted) < 3 and any(one.state is state for one in request.sequences)
        ]
        for name in found[:1]:
            aborted.append(name)
            toy.hear(toy.scheduler.abort([name]))
            assert name in toy.ended
            reasons = [toy.reasons[name][index] for index in range(toy.requests[name].params.n)]
            assert set(reasons) <= {FinishReason.ABORT, FinishReason.LENGTH} and FinishReason.ABORT in reasons
            toy.check_books()
    assert aborted, f"nothing was ever {state.value}"
    toy.drain()
    stats = toy.scheduler.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    for name in toy.requests:
        if name not in aborted:
            toy.check_tokens(name)
