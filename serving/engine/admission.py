"""Admission: a waiting sequence gets a slot and the pages that are already there for it (prefix, sibling, elsewhere)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from pagoda.serving.engine.adapters import NO_ADAPTER
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.plan import Admission, PageCopies
from pagoda.serving.engine.sequence import NO_SLOT, Sequence, State
from pagoda.serving.engine.starts import Start, StartFinder
from pagoda.serving.engine.transfer.connector import PageJob


@dataclass
class Admitted:
    """What one step admits; lists grow together."""

    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def copies(self) -> PageCopies | None:
        if not self.sources:
            return None
        return PageCopies(np.array(self.sources, np.int64), np.array(self.targets, np.int64))


class Admitter:
    """Takes sequences from the front of the queue while budget, slots and pages last. Nobody overtakes the front."""

    def __init__(self, ledger: Ledger, *, caching: bool, chunked: bool, threshold: int, encoder_budget: int = 0) -> None:
        self._ledger = ledger
        self._starts = StartFinder(ledger, caching)
        self._caching = caching
        self._chunked = chunked
        self._threshold = threshold if chunked else 0
        self._blocked: tuple[Sequence, int] | None = None
        self._jobs = 0
        self._encoder_budget = self._encoder_left = encoder_budget

    def admit(self, budget: int, enough: int = 0, prompts: int = 0) -> Admitted:
        """Fill up to `budget` tokens of the step. `enough`: none is taken in behind so many of prompts that end with it, of which there are
        `prompts` already; 0: any number."""
        admitted = Admitted()
        self._encoder_left = self._encoder_budget
        self._spawn()
        while budget > 0 and self._ledger.slots.free and not 0 < enough <= prompts:
            sequence = self._ledger.waiting.peek()
            if sequence is None or self._blocked == (sequence, self._ledger.pool.available):
                break
            count = self._admit(sequence, budget, admitted)
            if count is None:
                break
            budget -= count
            prompts += count
        return admitted

    def _admit(self, sequence: Sequence, budget: int, admitted: Admitted) -> int | None:
        """Tokens given to the front of the queue, 0 when it waits for a load first; None when it has to stay."""
        ledger = self._ledger
        start = self._starts.find(sequence, admitted.slots)
        if start is None:
            return None
        remote = self._remote_units(sequence, start)
        behind = len(sequence.tokens) - start.length
        count = self._with_media(sequence, start, self._count(sequence, start, min(behind, budget, self._threshold or behind)))
        if not count:
            return None
        if not remote and count < behind and not self._chunked:
            return None
        if remote and not self._fits(sequence, start, remote * ledger.index.unit):
            remote = 0
        if not self._fits(sequence, start, count):
            self._blocked = (sequence, ledger.pool.available)
            return None
        self._blocked = None
        adapter = self._place(sequence)
        if adapter is None or not self._may_encode(sequence):
            return None
        ledger.waiting.pop()
        slot = self._enter(sequence, start, adapter)
        self._count_hit(sequence, start)
        if remote:
            self._load(sequence, start, remote)
            return 0
        self._begin(sequence, slot, start, count, admitted)
        return count

    def _begin(self, sequence: Sequence, slot: int, start: Start, count: int, admitted: Admitted) -> None:
        ledger = self._ledger
        self._begin_state(sequence, slot, start)
        self._begin_cross(sequence, slot)
        ledger.tables.grow(slot, start.length + count)
        if len(start.running) and ledger.states is not None:
            admitted.sources += start.running.tolist()
            admitted.targets += ledger.states.take_copy(slot).tolist()
        for group, source in enumerate(start.partial):
            if source:
                admitted.sources.append(source)
                admitted.targets.append(int(ledger.tables.tables[group][slot, len(start.pages[group])]))
        ledger.run(sequence)
        ledger.count_computed(sequence.request)
        admitted.slots.append(slot)
        admitted.counts.append(count)
        admitted.admissions.append(make_admission(sequence))

    def _begin_state(self, sequence: Sequence, slot: int, start: Start) -> None:
        states = self._ledger.states
        if states is None:
            return
        if self._chunked:
            states.stops[slot] = self._stops(sequence, start)
        if len(start.state):
            self._ledger.pool.share(start.state)
            states.adopt(slot, start.state)

    def _may_encode(self, sequence: Sequence) -> bool:
        """Whether this step's encoder has room for what the sequence needs of it, which is then counted."""
        crosses, tokens = self._ledger.crosses, sequence.request.crossed
        if crosses is None or crosses.known(sequence.request.root, tokens, _crossed_sibling(sequence)):
            return True
        if tokens > self._encoder_left:
            return False
        self._encoder_left -= tokens
        return True

    def _begin_cross(self, sequence: Sequence, slot: int) -> None:
        request = sequence.request
        if self._ledger.crosses is not None and request.source.encoder is not None:
            sibling = _crossed_sibling(sequence)
            self._ledger.crosses.begin(slot, request.root, request.source.encoder, request.crossed, sibling)

    def _stops(self, sequence: Sequence, start: Start) -> tuple[int, ...]:
        """Where its steps are to end before all its known tokens are computed; 0 for nowhere."""
        last, unit = len(sequence.tokens) - 1, self._ledger.index.unit
        siblings = last if len(sequence.request.sequences) > 1 else 0
        return start.parting, last // unit * unit if self._caching else 0, siblings

    def _count(self, sequence: Sequence, start: Start, count: int) -> int:
        """`count` tokens, or fewer where the state at a place before is of use."""
        states = self._ledger.states
        if states is None or not self._chunked:
            return count
        ends = (stop for stop in self._stops(sequence, start) if stop > start.length)
        return min(count, min(ends, default=count + start.length) - start.length)

    def _with_media(self, sequence: Sequence, start: Start, count: int) -> int:
        """`count` tokens, or fewer where embeddings of media are not there and cannot be made in this step."""
        source, desk = sequence.request.source, self._ledger.media
        return count if desk is None or not source.media else desk.clip(source, start.length, count)

    def _remote_units(self, sequence: Sequence, start: Start) -> int:
        connector, unit = self._ledger.connector, self._ledger.index.unit
        have, most = start.length // unit, (len(sequence.tokens) - 1) // unit
        if connector is None or sequence.request.source.adapter is not None:  # another adapter may have that name by then
            return 0
        if not self._caching or sequence.computes_all or start.length % unit or most <= have:
            return 0
        return connector.match(sequence.digests[:most], have) - have

    def _load(self, sequence: Sequence, start: Start, units: int) -> None:
        index, tables = self._ledger.index, self._ledger.tables
        first = start.length // index.unit
        self._ledger.counters["external_queries"] += units * index.unit
        tables.grow(sequence.slot, (first + units) * index.unit)
        pages = tuple(index.unit_pages(tables.row(sequence.slot), unit) for unit in range(first, first + units))
        self._jobs += 1
        self._ledger.load(sequence, PageJob(self._jobs, tuple(sequence.digests[first : first + units]), pages))

    def _place(self, sequence: Sequence) -> int | None:
        """Device slot of its adapter; None when it has to wait for one."""
        adapter = sequence.request.adapter
        return NO_ADAPTER if adapter is None else self._ledger.adapters.place(adapter)

    def _enter(self, sequence: Sequence, start: Start, adapter: int) -> int:
        ledger = self._ledger
        slot = ledger.slots.take(sequence, start.length, adapter)
        ledger.slots.indexed[slot] = start.length // ledger.index.unit
        for group, pages in enumerate(start.pages):
            if len(pages):
                ledger.pool.share(pages[pages > 0])
                ledger.pool.found(pages[pages > 0])
                ledger.tables.adopt(slot, group, pages)
        return slot

    def _fits(self, sequence: Sequence, start: Start, count: int) -> bool:
        """Whether the whole known length fits: a prompt that is let in by halves would only be preempted."""
        ledger = self._ledger
        need = ledger.states.peak - int((ledger.pool.references(start.state) > 0).sum()) if ledger.states is not None else 0
        for rule, pages in zip(ledger.rules, start.pages, strict=True):
            held = rule.pages(len(sequence.tokens)) - rule.first_page(start.length)
            need += held if rule.window is None else min(held, rule.pages(rule.window + count) + 1)
            if len(pages):
                need -= int((ledger.pool.references(pages[pages > 0]) > 0).sum())
        if ledger.crosses is not None:
            need += ledger.crosses.need(sequence.request.root, sequence.request.crossed, _crossed_sibling(sequence))
        spare = ledger.pool.num_pages // 100 if ledger.running else 0
        return need + spare <= ledger.pool.available

    def _count_hit(self, sequence: Sequence, start: Start) -> None:
        request = sequence.request
        if request.looked_up:
            return
        request.looked_up, request.queued = True, time.monotonic() - request.submitted
        request.cached_tokens = start.length
        self._ledger.counters["prefix_queries"] += len(request.source.prompt)
        self._ledger.counters["prefix_hits"] += start.length

    def _spawn(self) -> None:
        """Siblings join the queue once the first sequence's prompt is in pages (or it has ended)."""
        ledger, still = self._ledger, []
        for first in ledger.spawning:
            prompt = len(first.request.source.prompt)
            if first.live and (first.slot == NO_SLOT or ledger.slots.computed[first.slot] < prompt - 1):
                still.append(first)
                continue
            for sibling in first.request.sequences[1:]:
                if sibling.state is State.WAITING_SIBLING:
                    ledger.waiting.push(sibling)
        ledger.spawning = still


def _crossed_sibling(sequence: Sequence) -> int | None:
    """The slot of a running sequence of the same request, whose encoder's pages it can share."""
    siblings = (one for one in sequence.request.sequences if one is not sequence and one.state is State.RUNNING)
    return next((one.slot for one in siblings), None)


def make_admission(sequence: Sequence) -> Admission:
    """What the ranks are told of a sequence that begins, or begins again."""
    request = sequence.request
    output = tuple(sequence.tokens[len(request.source.prompt) :].tolist()) if len(sequence.tokens) > len(request.source.prompt) else ()
    source = request.source
    return Admission(
        sequence.slot,
        request.params,
        source.prompt,
        output,
        sequence.index,
        source.eos_ids,
        source.pooling,
        source.positions,
        source.spoken,
    )
