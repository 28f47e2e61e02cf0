"""Which request goes first: a policy gives each sequence a key, lower first; the waiting queue is a heap of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from pagoda.hal.errors import ConfigError
from pagoda.serving.engine.sequence import Sequence, State

Key = tuple[int, ...]


class Policy(Protocol):
    """An order of sequences that does not change while they live; the last one is preempted first."""

    def key(self, sequence: Sequence) -> Key: ...


class FirstComeFirstServed:
    def key(self, sequence: Sequence) -> Key:
        return sequence.request.order, sequence.index


class Priority:
    """Lower `EngineRequest.priority` first, then first come."""

    def key(self, sequence: Sequence) -> Key:
        return sequence.request.source.priority, sequence.request.order, sequence.index


def make_policy(name: str) -> Policy:
    policies: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}
    if name not in policies:
        raise ConfigError(f"scheduling_policy={name!r} is unknown; there are {sorted(policies)}")
    return policies[name]()


class WaitingQueue:
    """Sequences in state WAITING, first by key. One that changes its state otherwise is dropped when it comes to the front.

    Attributes:
        tokens: of all of them, and of those that are still to be dropped.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, Sequence, int]] = []
        self.tokens = 0

    @property
    def count(self) -> int:
        """Of sequences, those that are still to be dropped included."""
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence, len(sequence.tokens)))
        self.tokens += len(sequence.tokens)

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][1].state is not State.WAITING:
            self.pop()
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        _, sequence, tokens = heapq.heappop(self._heap)
        self.tokens -= tokens
        return sequence

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence, _ in self._heap if sequence.state is State.WAITING)
