"""One step's plan: every running sequence gets what it is behind by, as far as the token budget and the pages last."""

from __future__ import annotations

import numpy as np
from pagoda.serving.engine.admission import Admitted, Admitter, make_admission
from pagoda.serving.engine.bursts import BurstRule
from pagoda.serving.engine.grammar import MaskFiller, release_idle
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.pace import Pace
from pagoda.serving.engine.plan import ON_DEVICE, Admission, IntArray, StepPlan
from pagoda.serving.engine.sequence import State
from pagoda.serving.engine.speculation import Speculator


class Planner:
    """There are no modes: a decode is behind by one token, a prompt by its rest, a resumed sequence by all it has."""

    def __init__(
        self,
        ledger: Ledger,
        admitter: Admitter,
        *,
        budget: int,
        threshold: int,
        masks: MaskFiller,
        bursts: BurstRule,
        pace: Pace,
        chunked: bool,
        speculator: Speculator | None = None,
    ) -> None:
        self._ledger = ledger
        self._admitter = admitter
        self._budget = budget
        self._threshold = threshold
        self._bursts, self._pace, self._held_ms = bursts, pace, 0.0
        self._chunked = chunked and (ledger.media is None or not ledger.media.store.whole)
        self._speculator = speculator
        self._masks = masks
        self._step = 0

    def plan(self, idle: bool, capture: bool = False) -> StepPlan | None:
        """`idle` says that no step is in flight, so that waiting for one would be for ever. `capture`: see `StepPlan`."""
        self._ledger.take_loaded()
        self._masks.forget()
        draining = len(self._ledger.draining)
        preemptions = self._ledger.counters["preemptions"]
        slots, counts, runs = self._running()
        admitted = Admitted()
        if self._ledger.counters["preemptions"] == preemptions and not draining:
            admitted = self._admit(slots, counts)
            slots, counts = self._hold(slots, counts, admitted)
        if not len(slots) and not admitted.slots and idle and not self._ledger.loading:
            admitted = self._unstick(admitted)
        if admitted.slots:
            slots = np.concatenate([slots, np.array(admitted.slots, np.int32)])
            counts = np.concatenate([counts, np.array(admitted.counts, np.int32)])
        return self._build(slots, counts, admitted, runs, capture) if len(slots) else None

    def _running(self) -> tuple[IntArray, IntArray, IntArray | None]:
        slots, order = self._ledger.slots, self._ledger.order
        slots.drafted[order] = 0
        slots.follow_due(order)
        want = self._want(order)
        if self._ledger.epochs is not None:
            self._renew(order, want)
        rows = np.flatnonzero(want)
        chosen, counts = order[rows], want[rows]
        if (runs := self._bursts.runs(chosen, counts)) is not None:
            self._ledger.tables.extend(chosen, self._ledger.tables.need(chosen, slots.computed[chosen] + runs))
            return chosen, counts, runs
        needs = self._ledger.tables.need(chosen, slots.computed[chosen] + counts)
        if self._speculator is not None and self._speculator.may_draft(chosen) and needs.sum() <= self._ledger.pool.available:
            counts, needs = self._with_drafts(self._speculator, chosen, counts, needs)
        if needs.sum() > self._ledger.pool.available:
            kept = self._squeeze(chosen, needs.sum(0))
            chosen, counts, needs = chosen[kept], counts[kept], needs[:, kept]
        self._ledger.tables.extend(chosen, needs)
        return chosen, counts, None

    def _renew(self, order: IntArray, want: IntArray) -> None:
        """Sequences that grew into another epoch of the model's lengths are computed again from their first token."""
        for row in np.flatnonzero(want).tolist():
            slot = int(order[row])
            sequence = self._ledger.slots.sequence(slot)
            if sequence.epoch != self._ledger.epoch(int(self._ledger.slots.total[slot])):
                self._ledger.restart(sequence)
                want[row] = 0

    def _with_drafts(self, speculator: Speculator, chosen: IntArray, counts: IntArray, needs: IntArray) -> tuple[IntArray, IntArray]:
        """Drafts take what budget and pages are left; nobody is preempted for them."""
        more = counts + speculator.draft(chosen, counts, self._budget - int(counts.sum()))
        wanted = self._ledger.tables.need(chosen, self._ledger.slots.computed[chosen] + more)
        if wanted.sum() <= self._ledger.pool.available:
            return more, wanted
        self._ledger.slots.drafted[chosen] = 0
        return counts, needs

    def _want(self, order: IntArray) -> IntArray:
        slots = self._ledger.slots
        total = slots.total[order]
        want = total - slots.computed[order]
        ready = slots.active[order] & (total < slots.limit[order])
        # Bound rows go on together: some in each of two steps that take turns would read the weights twice for what one step can do.
        bound, unknown = slots.bound[order], total != slots.known[order]
        awaited = bool((bound & unknown & (slots.in_flight[order] > 0)).any())
        ready &= ~bound | ~(unknown | (awaited & (total > slots.prompt[order])))
        want *= ready
        states = self._ledger.states
        whole = want.copy() if states is not None else want
        if self._threshold:
            np.minimum(want, self._threshold, out=want)
        budget = self._step_budget()
        if budget < self._budget and self._ledger.waiting.peek() is not None:
            budget = max(budget // 2, len(order) + 1)  # who waits need not wait for the end of a long prompt
        if want.sum() > budget:
            want = self._deal(want, budget)
        if self._ledger.media is not None:
            want = self._ledger.media.clip_running(order, slots.computed[order], want)
        return want if states is None else states.clip(order, slots.computed[order], want, whole)

    def _step_budget(self) -> int:
        """Where rows are dear, a step that others wait for, or may wait for, is not filled with the chunk of a long prompt."""
        if not self._chunked or not self._pace.dear:
            return self._budget
        running = len(self._ledger.running)
        most = self._pace.chunk_tokens(running + (self._ledger.waiting.peek() is not None) > 1)
        return min(self._budget, max(most, running + 1))

    def _admit(self, slots: IntArray, counts: IntArray) -> Admitted:
        left, enough, state = self._step_budget() - int(counts.sum()), self._pace.prompt_tokens, self._ledger.slots
        if not enough:
            return self._admitter.admit(left)
        ends = (counts > 1) & (state.computed[slots] + counts == state.total[slots])
        return self._admitter.admit(left, enough, int(counts[ends].sum()))

    def _hold(self, slots: IntArray, counts: IntArray, admitted: Admitted) -> tuple[IntArray, IntArray]:
        """Without decodes, where they would take much of the time of a step that brings first tokens."""
        if not self._pace.dear:
            return slots, counts
        decodes, prompts = int((counts == 1).sum()), int(counts[counts > 1].sum()) + sum(admitted.counts)
        if not decodes or not prompts or self._ledger.states is not None or self._ledger.slots.drafted[slots].any():
            self._held_ms = 0.0
            return slots, counts
        takes = self._pace.hold_ms(decodes, prompts, self._held_ms)
        self._held_ms = self._held_ms + takes if takes else 0.0
        return (slots[counts > 1], counts[counts > 1]) if takes else (slots, counts)

    def _deal(self, want: IntArray, budget: int) -> IntArray:
        """Too much is wanted: decodes first, so that no prompt stalls them, then in order."""
        first = np.concatenate([np.flatnonzero(want == 1), np.flatnonzero(want != 1)])
        asked = want[first]
        given = np.empty_like(want)
        given[first] = np.clip(budget - (np.cumsum(asked, dtype=np.int32) - asked), 0, asked)
        return given

    def _squeeze(self, chosen: IntArray, needs: IntArray) -> IntArray:
        """Rows that can have their pages, after preempting the last in order for those before them."""
        kept, promised = [], 0
        for row, (slot, need) in enumerate(zip(chosen.tolist(), needs.tolist(), strict=True)):
            sequence = self._ledger.slots.sequences[slot]
            if sequence is None or sequence.state is not State.RUNNING:
                continue
            while promised + need > self._ledger.pool.available and self._make_room(sequence.slot):
                pass
            if sequence.state is State.RUNNING and promised + need <= self._ledger.pool.available:
                kept.append(row)
                promised += need
        return np.array(kept, np.int64)

    def _make_room(self, slot: int) -> bool:
        """Preempt one sequence for this slot's. False when nothing is gained now: the slot has to wait a step."""
        running = self._ledger.running
        if len(running) == 1 or self._ledger.draining:
            return False
        victim = running[-1]
        mine = victim.slot == slot
        self._ledger.preempt(victim)
        return not mine

    def _unstick(self, admitted: Admitted) -> Admitted:
        """Running sequences that wait for waiting ones (beams of one search, one of them preempted): the last in order gives way."""
        while not admitted.slots and self._ledger.running and self._ledger.waiting.peek() is not None:
            self._ledger.preempt(self._ledger.running[-1])
            admitted = self._admitter.admit(self._budget)
        return admitted

    def _build(self, slots: IntArray, counts: IntArray, admitted: Admitted, runs: IntArray | None, capture: bool) -> StepPlan:
        state = self._ledger.slots
        if counts.max() > 1:
            order = np.concatenate([np.flatnonzero(counts > 1), np.flatnonzero(counts == 1)])
            slots, counts = slots[order], counts[order]
        starts, total = state.computed[slots], state.total[slots]
        ends = starts + counts
        drafted = state.drafted[slots]
        drafts = self._speculator.columns(slots) if self._speculator is not None else None
        sampled = ends == total + drafted
        crosses = self._ledger.crosses
        grammars = self._masks(self._ledger, slots, sampled, drafts[1] if drafts is not None else None)
        if grammars is not None:
            release_idle(self._ledger, slots[grammars.rows])
        plan = StepPlan(
            step=self._step,
            slots=slots,
            starts=starts,
            lengths=counts,
            token_ids=self._tokens(slots, starts, counts),
            block_tables=self._ledger.tables.rows(slots),
            sampled=sampled,
            bound=state.bound[slots],
            draws=total - state.prompt[slots],
            admissions=(*self._arrivals(admitted), *admitted.admissions),
            copies=admitted.copies(),
            masks=grammars.bits if grammars is not None else None,
            mask_rows=grammars.rows if grammars is not None else None,
            mask_nodes=grammars.nodes if grammars is not None and drafts is not None else None,
            drafts=drafts[0] if drafts is not None else None,
            parents=drafts[1] if drafts is not None else None,
            certain=grammars.certain if grammars is not None else None,
            adapters=self._adapters(slots),
            placements=self._ledger.adapters.take_placements(),
            media=self._ledger.media.plan(slots, starts, counts) if self._ledger.media is not None else None,
            taps=self._speculator.taps if self._speculator is not None else (),
            tapped=self._speculator.tapped(slots) if self._speculator is not None else None,
            runs=runs,
            encodes=crosses.take_encodes() if crosses is not None else (),
            cross_lengths=crosses.length[slots] if crosses is not None else None,
            capture=capture,
        )
        self._ledger.hold_copied(plan)
        if self._ledger.states is not None:
            self._ledger.states.advance(plan.step, slots, starts, ends)
        state.computed[slots] = ends if runs is None else starts + runs
        state.total[slots] = total + (sampled * (1 + drafted) if runs is None else runs)
        state.in_flight[slots] += 1
        self._step += 1
        return plan

    def _adapters(self, slots: IntArray) -> IntArray | None:
        if not self._ledger.adapters.enabled:
            return None
        adapters: IntArray = self._ledger.slots.adapter[slots]
        return adapters if adapters.max() >= 0 else None

    def _arrivals(self, admitted: Admitted) -> list[Admission]:
        arrived, self._ledger.arrived = self._ledger.arrived, []
        return [make_admission(one) for one in arrived if one.state is State.RUNNING and one.slot not in admitted.slots]

    def _tokens(self, slots: IntArray, starts: IntArray, counts: IntArray) -> IntArray:
        state = self._ledger.slots
        ends = np.cumsum(counts, dtype=np.int32)
        if ends[-1] > len(counts):
            first = np.repeat(starts - (ends - counts), counts)
            slots, starts = np.repeat(slots, counts), first + np.arange(ends[-1], dtype=np.int32)
        tokens: IntArray = state.tokens[slots, starts]
        tokens[starts >= state.known[slots] + state.drafted[slots]] = ON_DEVICE
        return tokens
