"""A request and its sequences as the scheduler keeps them: everything that the steady decode path does not touch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import IntArray
from pagoda.serving.engine.pooling import Pooled
from pagoda.serving.engine.prefix import NO_MARKS

if TYPE_CHECKING:
    from pagoda.serving.engine.adapters import LoadedAdapter
    from pagoda.serving.engine.beam_rows import Beams
    from pagoda.serving.engine.grammar import Grammar, Matcher

NO_SLOT = -1


class State(Enum):
    """Where a sequence is. WAITING_* are gates: it is not looked at until each is opened."""

    WAITING = "waiting"
    WAITING_REMOTE_KV = "waiting_remote_kv"
    WAITING_GRAMMAR = "waiting_grammar"
    WAITING_ENCODER = "waiting_encoder"
    WAITING_SIBLING = "waiting_sibling"
    RUNNING = "running"
    PREEMPTING = "preempting"
    FINISHED = "finished"

    @property
    def deferred(self) -> bool:
        """It waits for something other than room."""
        return self in _GATES


_GATES = frozenset({State.WAITING_REMOTE_KV, State.WAITING_GRAMMAR, State.WAITING_ENCODER, State.WAITING_SIBLING})


@dataclass(eq=False)
class Request:
    """A live request.

    Attributes:
        params: the client's, with a seed drawn where it brought none.
        order: counts submissions. root: start of its hash chains.
        gates: what must open before it may run. unfinished: sequences that have not ended.
        answered: a delta was sent. looked_up: the prefix index was asked, and gave `cached_tokens` of the prompt.
        submitted: when, on the monotonic clock. queued: seconds from then until its first sequence was let in.
        prompt_logprobs: those collected so far, None where not asked for.
        beams: its beam search; its sequences are then the living beams. born: sequences ever begun, forks included.
        grammar: what its output must match, once that is compiled.
        adapter: the one that it asked for.
        marks: what units of its hash chain depend on beside tokens.
        pools_all: the hidden state of every prompt token counts. pooled: the answer of a pooling request.
        crossed: tokens that the encoder gives for it, of models that have one.
        failure: why it cannot be answered, found while it was. preempted: how often its sequences were.
        begun: one of its sequences has begun to compute.
    """

    source: EngineRequest
    params: SamplingParams
    order: int
    root: bytes
    gates: set[State] = field(default_factory=set)
    sequences: list[Sequence] = field(default_factory=list)
    unfinished: int = 0
    answered: bool = False
    looked_up: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    beams: Beams | None = None
    born: int = 0
    grammar: Grammar | None = None
    adapter: LoadedAdapter | None = None
    marks: Mapping[int, bytes] = field(default_factory=lambda: NO_MARKS)
    pools_all: bool = False
    pooled: Pooled | None = None
    submitted: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    crossed: int = 0
    failure: str | None = None
    preempted: int = 0
    begun: bool = False

    @property
    def id(self) -> str:
        return self.source.request_id


@dataclass(eq=False)
class Sequence:
    """One of a request's sequences.

    Attributes:
        tokens: prompt and output while it has no slot; the slots' arrays hold them while it has one.
        slot: its slot, or NO_SLOT.
        digests: the hash chain over its tokens, as far as it was needed.
        epoch: of its length (`RunnerFacts.length_epochs`); what was computed in another one is not shared with it.
        matcher: its place in the request's grammar, after `matched` tokens of output.
    """

    request: Request
    index: int
    tokens: IntArray
    limit: int
    state: State = State.WAITING
    slot: int = NO_SLOT
    digests: list[bytes] = field(default_factory=list)
    epoch: int = 0
    matcher: Matcher | None = None
    matched: int = 0

    @property
    def root(self) -> bytes:
        """Start of its hash chain."""
        return self.request.root + self.epoch.to_bytes(4, "little") if self.epoch else self.request.root

    def renew(self, epoch: int) -> None:
        """It has grown into another epoch: nothing that it had in pages is found again."""
        self.epoch, self.digests = epoch, []

    @property
    def live(self) -> bool:
        return self.state is not State.FINISHED

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.index == 0 and self.request.prompt_logprobs is not None and not self.request.answered

    @property
    def computes_all(self) -> bool:
        """Something is made of every prompt token, so that no page of another request saves one."""
        return self.wants_prompt_logprobs or self.request.pools_all
