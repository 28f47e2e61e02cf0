"""The scheduler's books: which requests live, where each sequence is, and how it enters and leaves the running ones."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable

import numpy as np
from pagoda.models.model import LengthEpochs
from pagoda.serving.engine.adapters import AdapterBook
from pagoda.serving.engine.blocks import BlockPool
from pagoda.serving.engine.crosses import CrossTables
from pagoda.serving.engine.groups import cross_groups, token_rules
from pagoda.serving.engine.histograms import Histograms
from pagoda.serving.engine.media import MediaDesk, Store
from pagoda.serving.engine.plan import IntArray, RunnerFacts, StepPlan
from pagoda.serving.engine.policy import Key, WaitingQueue, make_policy
from pagoda.serving.engine.prefix import PrefixIndex
from pagoda.serving.engine.sequence import NO_SLOT, Request, Sequence, State
from pagoda.serving.engine.slots import Slots
from pagoda.serving.engine.states import StateTables, kept_every, state_group
from pagoda.serving.engine.tables import BlockTables
from pagoda.serving.engine.transfer.connector import CacheConnector, PageJob

log = logging.getLogger("pagoda.engine")


class Ledger:
    """Attributes:
    requests: live ones by id. running: sequences in policy order. draining: sequences that left but that a step in flight
    still holds, so that their slots and pages are not free yet. loading: sequences whose KV comes from elsewhere, by job.
    spawning: sequences whose siblings wait for the prompt's pages. arrived: sequences whose load ended and of which the ranks
    were not told yet. adapters: those that requests may use. counters: totals for `EngineStats`; histograms: its spreads; accepted_at:
    accepted drafts by how deep they were.
    """

    def __init__(
        self,
        facts: RunnerFacts,
        max_num_seqs: int,
        policy: str,
        connector: CacheConnector | None = None,
        budget: int = 2048,
        caching: bool = True,
    ) -> None:
        self.connector = connector
        self.epochs: LengthEpochs | None = facts.length_epochs
        self.rules = token_rules(facts.groups)
        self.histograms = Histograms()
        self.pool = BlockPool(facts.num_pages, self.histograms)
        self.slots = Slots(max_num_seqs, facts.max_model_len + (facts.pooling is not None))
        self.adapters = AdapterBook(self.slots, facts.adapter_slots, facts.adapters)
        self.states = _state_tables(facts, self.pool, self.slots)
        crossed = cross_groups(facts.groups)
        self.crosses = CrossTables(self.pool, crossed, max_num_seqs, caching) if crossed else None
        self.tables = BlockTables(self.pool, self.rules, max_num_seqs, facts.max_model_len, self.states, self.crosses)
        self.index = PrefixIndex(self.pool, self.rules, self.states)
        self.media = MediaDesk(Store.of(facts, budget), self.slots) if facts.media is not None else None
        self.policy = make_policy(policy)
        self.waiting = WaitingQueue(self.policy)
        self.requests: dict[str, Request] = {}
        self.running: list[Sequence] = []
        self.draining: list[Sequence] = []
        self.loading: dict[int, Sequence] = {}
        self.spawning: list[Sequence] = []
        self.arrived: list[Sequence] = []
        self.counters: Counter[str] = Counter()
        self.accepted_at: Counter[int] = Counter()
        self.finished: Counter[str] = Counter()
        self._order: IntArray | None = None

    @property
    def order(self) -> IntArray:
        """Slots of the running sequences, in policy order."""
        if self._order is None:
            self._order = np.array([sequence.slot for sequence in self.running], np.int32)
        return self._order

    def run(self, sequence: Sequence) -> None:
        """A sequence with a slot joins the running ones."""
        sequence.state = State.RUNNING
        if self.running and self._key(self.running[-1]) > self._key(sequence):
            insort(self.running, sequence, key=self._key)
        else:
            self.running.append(sequence)
        self._order = None

    def epoch(self, length: int) -> int:
        """The epoch of a sequence of this length: 0 where the model has none."""
        return self.epochs.of(length) if self.epochs is not None else 0

    def preempt(self, sequence: Sequence) -> None:
        """Back to the waiting ones, to be computed again; tokens that steps in flight give are kept."""
        self.counters["preemptions"] += 1
        sequence.request.preempted += 1
        self._say_preempted(sequence, self.counters["preemptions"])
        self.restart(sequence)

    def restart(self, sequence: Sequence) -> None:
        """The same, for a sequence whose pages are of no more use, rather than wanted by others."""
        if sequence.request.beams is not None:
            sequence.request.beams.answers.pop(sequence, None)
        self._leave(sequence, State.PREEMPTING)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End it, wherever it is, and its request with the last one."""
        self.drop(sequence)
        self.finished[reason] += 1
        sequence.request.unfinished -= 1
        if not sequence.request.unfinished:
            self._forget(sequence.request)

    def close(self, request: Request, reasons: Iterable[str]) -> None:
        """End a request at once: all its sequences, for the reasons that its client is told."""
        for sequence in request.sequences:
            if sequence.live:
                self.drop(sequence)
        self.finished.update(reasons)
        request.unfinished = 0
        self._forget(request)

    def drop(self, sequence: Sequence) -> None:
        """The sequence alone ends; its pages are free as soon as no step in flight holds them."""
        if sequence.state in (State.RUNNING, State.PREEMPTING, State.WAITING_REMOTE_KV):
            self._leave(sequence, State.FINISHED)
        else:
            sequence.state = State.FINISHED

    def _forget(self, request: Request) -> None:
        if self.requests.pop(request.id, None) is not None:
            self.histograms.of["request_preemptions"].add(request.preempted)
        self.spawning = [other for other in self.spawning if other.request is not request]

    def let_go_states(self, step: int, caching: bool) -> None:
        """States that a committed step read and that its sequences have moved on from: found by others from now on, or free."""
        if self.states is None:
            return
        for left in self.states.let_go(step):
            if caching and self.slots.open[left.slot]:
                sequence, units = self.slots.sequence(left.slot), left.tokens // self.index.unit
                self.index.extend(sequence.digests, sequence.root, self.slots.tokens[left.slot, : left.tokens], sequence.request.marks)
                self.index.insert_state(sequence.digests[units - 1], left.pages)
            self.pool.release(left.pages)

    def settle(self) -> None:
        """Free what draining sequences hold, where no step in flight holds it any more."""
        waiting = []
        for sequence in self.draining:
            if self.slots.in_flight[sequence.slot]:
                waiting.append(sequence)
            else:
                self._release(sequence)
        self.draining = waiting

    def hold_copied(self, plan: StepPlan) -> None:
        """Keep the sources of a step's copies until it has committed, also when their owner drops them meanwhile."""
        if plan.copies is not None:
            self.pool.share(np.unique(plan.copies.source).astype(np.int32))

    def let_go_copied(self, plan: StepPlan) -> None:
        """The step has committed, or never will."""
        if plan.copies is not None:
            self.pool.release(np.unique(plan.copies.source).astype(np.int32))

    def drop_steps(self, plans: Iterable[StepPlan]) -> None:
        """Forget these steps, all that are in flight (they failed)."""
        for plan in plans:
            self.let_go_copied(plan)
            self.let_go_states(plan.step, caching=False)
        self.slots.in_flight[:] = 0
        self.settle()

    def _leave(self, sequence: Sequence, state: State) -> None:
        if sequence.state is State.RUNNING:
            del self.running[bisect_left(self.running, self._key(sequence), key=self._key)]
            self._order = None
        self.slots.active[sequence.slot] = False
        self.slots.open[sequence.slot] = state is State.PREEMPTING
        held = sequence.state in (State.WAITING_REMOTE_KV, State.PREEMPTING)  # somebody still writes its pages
        sequence.state = state
        if held:
            return
        if self.slots.in_flight[sequence.slot]:
            self.draining.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.slot != NO_SLOT:
            self.tables.release(sequence.slot)
            self.slots.give_back(sequence)
        if sequence.state is State.PREEMPTING:
            epoch = self.epoch(len(sequence.tokens))
            if epoch != sequence.epoch:
                sequence.renew(epoch)
            self.waiting.push(sequence)

    def load(self, sequence: Sequence, job: PageJob) -> None:
        """A sequence with a slot and pages waits until its connector has filled them."""
        assert self.connector is not None
        sequence.state = State.WAITING_REMOTE_KV
        self.slots.active[sequence.slot] = False
        self.loading[job.key] = sequence
        self.connector.load(job)

    def take_loaded(self) -> None:
        """Sequences whose load ended run, computing what is missing; those that ended meanwhile give their pages back."""
        if self.connector is None:
            return
        for key, units in self.connector.done():
            sequence = self.loading.pop(key)
            if sequence.state is State.FINISHED:
                self._release(sequence)
            else:
                self._start(sequence, units * self.index.unit)

    def _start(self, sequence: Sequence, loaded: int) -> None:
        slot = sequence.slot
        self.counters["external_hits"] += loaded
        tokens = int(self.slots.computed[slot]) + loaded
        self.slots.computed[slot] = self.slots.committed[slot] = tokens
        self.slots.active[slot] = True
        if not sequence.request.answered:
            sequence.request.cached_tokens += loaded
        self.count_computed(sequence.request)
        self.arrived.append(sequence)
        self.run(sequence)

    def count_computed(self, request: Request) -> None:
        """It begins: what was not found of its prompt is computed."""
        if not request.begun:
            request.begun = True
            self.counters["computed_tokens"] += len(request.source.prompt) - request.cached_tokens

    def _say_preempted(self, sequence: Sequence, count: int) -> None:
        if count & (count - 1):  # the 1st, 2nd, 4th, 8th, …
            return
        log.warning(
            "request %s is computed again later: %d sequences fill the %d pages of the KV cache (preemption %d);"
            " give it more memory, or lower max_num_seqs",
            sequence.request.id,
            len(self.running),
            self.pool.num_pages - 1,
            count,
        )

    def _key(self, sequence: Sequence) -> Key:
        return self.policy.key(sequence)


def _state_tables(facts: RunnerFacts, pool: BlockPool, slots: Slots) -> StateTables | None:
    group = state_group(facts.groups)
    return StateTables(pool, group, slots.count, kept_every(facts.groups), slots.drafted) if group is not None else None
