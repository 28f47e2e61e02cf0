"""What a step's result changes: known tokens, ends, the prefix index, pages that left a window, and the clients' deltas."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pagoda.serving.engine.beam_rows import answer
from pagoda.serving.engine.bursts import take_runs
from pagoda.serving.engine.indexer import Indexer
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.messages import FinishReason, RequestDelta, SequenceDelta, StepDeltas, TokenLogprobs
from pagoda.serving.engine.plan import BoolArray, IntArray, RowLogprobs, StepPlan, StepResult
from pagoda.serving.engine.pooling import Pooled
from pagoda.serving.engine.sequence import Request, Sequence
from pagoda.serving.engine.speculation import take_accepted

_AN = {"image": "an image", "video": "a video", "audio": "a sound"}


class _Sampled(NamedTuple):
    """Rows that gave tokens which count: slots, newest tokens, index among the step's sampled rows, whether the sequence ends, and
    all the new tokens of each row where there may be several (drafts, runs)."""

    slots: IntArray
    tokens: IntArray
    rows: IntArray
    ended: BoolArray
    runs: list[tuple[int, ...]] | None = None


class Committer:
    """Takes results. What a sequence was given after its end, by steps already in flight, is dropped here."""

    def __init__(self, ledger: Ledger, *, caching: bool) -> None:
        self._ledger = ledger
        self._indexer = Indexer(ledger) if caching else None

    def commit(self, plan: StepPlan, result: StepResult) -> StepDeltas:
        slots = self._ledger.slots
        self._ledger.let_go_copied(plan)
        slots.in_flight[plan.slots] -= 1
        slots.committed[plan.slots] += plan.lengths if plan.runs is None else plan.runs
        self._measure(plan)
        self._take_prompt_logprobs(plan, result)
        others = self._fail_bad_rows(plan, result) + self._fail_unseen(result)
        sampled = self._take_tokens(plan, result)
        open_slots = plan.slots[slots.open[plan.slots]]
        if self._indexer is not None:
            self._indexer.index(open_slots)
        self._ledger.let_go_states(plan.step, self._indexer is not None)
        self._ledger.tables.trim(open_slots, slots.committed[open_slots])
        if len(sampled.slots) < len(result.tokens):
            others += self._turn_beams(plan, result)
        deltas = self._deltas(sampled, result, others)
        if self._ledger.draining:
            self._ledger.settle()
        return deltas

    def _measure(self, plan: StepPlan) -> None:
        """How many tokens each of its steps computed."""
        spread = self._ledger.histograms.of["iteration_tokens"]
        if plan.runs is None:
            spread.add(int(plan.lengths.sum()))
        else:
            spread.extend((plan.runs[:, None] > np.arange(plan.runs.max())).sum(0))

    def _take_tokens(self, plan: StepPlan, result: StepResult) -> _Sampled:
        slots = self._ledger.slots
        chosen = plan.slots[plan.sampled]
        rows = np.arange(len(chosen), dtype=np.int32)
        tokens = result.tokens[:, 0]
        live = slots.open[chosen] & ~slots.searching[chosen]
        if not live.all():
            chosen, rows, tokens = chosen[live], rows[live], tokens[live]
        if plan.drafts is not None:
            self._count_drafts(plan.drafts[plan.sampled][rows], result.counts[rows], slots.jumped[chosen])
            return self._take_drafted(chosen, rows, plan.bound[plan.sampled][rows], result)
        if plan.runs is not None:
            return self._take_runs(chosen, rows, result)
        known = slots.known[chosen]
        slots.tokens[chosen, known] = tokens
        slots.known[chosen] = known + 1
        ended = slots.stopped(chosen, tokens) | (known + 1 >= slots.limit[chosen])
        if result.pooled:
            self._take_pooled(chosen, rows, result)
        else:
            self._ledger.counters["generation_tokens"] += len(chosen)
        return _Sampled(chosen, tokens, rows, ended)

    def _take_pooled(self, chosen: IntArray, rows: IntArray, result: StepResult) -> None:
        for slot, row in zip(chosen.tolist(), rows.tolist(), strict=True):
            values = result.pooled[row]
            self._ledger.slots.sequence(slot).request.pooled = Pooled(values.shape, values.astype("<f4").tobytes())

    def _take_drafted(self, chosen: IntArray, rows: IntArray, bound: BoolArray, result: StepResult) -> _Sampled:
        slots = self._ledger.slots
        runs = take_accepted(self._ledger, chosen, rows, bound, result)
        tokens = np.array([run[-1] for run in runs], np.int32)
        ended = slots.stopped(chosen, tokens) | (slots.known[chosen] >= slots.limit[chosen])
        self._ledger.counters["generation_tokens"] += sum(map(len, runs))
        return _Sampled(chosen, tokens, rows, ended, runs)

    def _take_runs(self, chosen: IntArray, rows: IntArray, result: StepResult) -> _Sampled:
        taken = take_runs(self._ledger.slots, chosen, result.tokens[rows], result.counts[rows])
        self._ledger.counters["generation_tokens"] += sum(map(len, taken.runs))
        return _Sampled(chosen, taken.newest, rows, taken.ended, taken.runs)

    def _count_drafts(self, drafts: IntArray, counts: IntArray, jumped: BoolArray) -> None:
        drafted, counters = (drafts >= 0).sum(1), self._ledger.counters
        taken = np.where(drafted > 0, counts - 1, 0)
        counters["jumped_tokens"] += int(taken[jumped].sum())
        drafted, taken = drafted[~jumped], taken[~jumped]
        counters["drafts"] += int((drafted > 0).sum())
        counters["draft_tokens"] += int(drafted.sum())
        counters["accepted_tokens"] += int(taken.sum())
        for place in range(int(taken.max(initial=0))):
            self._ledger.accepted_at[place] += int((taken > place).sum())

    def _turn_beams(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        slots, chosen = self._ledger.slots, plan.slots[plan.sampled]
        rows = np.flatnonzero(slots.open[chosen] & slots.searching[chosen]).tolist()
        beams = [(slots.sequence(int(chosen[row])), result.logprobs[row]) for row in rows]
        self._ledger.counters["generation_tokens"] += len(beams)
        answers = [(sequence.request, answer(self._ledger, sequence, logprobs)) for sequence, logprobs in beams]
        return [_request_delta(request, deltas) for request, deltas in answers if deltas]

    def _deltas(self, sampled: _Sampled, result: StepResult, others: list[RequestDelta]) -> StepDeltas:
        slots = self._ledger.slots
        plain = slots.plain[sampled.slots] & ~sampled.ended
        told: dict[str, tuple[Request, list[SequenceDelta]]] = {}
        for i in np.flatnonzero(~plain).tolist():
            slot = int(sampled.slots[i])
            tokens = sampled.runs[i] if sampled.runs is not None else (int(sampled.tokens[i]),)
            sequence = slots.sequence(slot)
            logprobs, ended = result.logprobs.get(int(sampled.rows[i])), bool(sampled.ended[i])
            delta = self._pooled_delta(sequence) if result.pooled else self._sequence_delta(sequence, tokens, logprobs, ended)
            told.setdefault(sequence.request.id, (sequence.request, []))[1].append(delta)
            slots.plain[slot] = is_plain(sequence)
        others += [_request_delta(request, deltas) for request, deltas in told.values()]
        ids = slots.ids[sampled.slots[plain]].tolist()
        if sampled.runs is None:
            return StepDeltas(ids, sampled.tokens[plain].tolist(), others)
        pairs = [(name, token) for name, row in zip(ids, np.flatnonzero(plain).tolist(), strict=True) for token in sampled.runs[row]]
        return StepDeltas([name for name, _ in pairs], [token for _, token in pairs], others)

    def _sequence_delta(self, sequence: Sequence, tokens: tuple[int, ...], logprobs: RowLogprobs | None, ended: bool) -> SequenceDelta:
        entries = as_logprobs(logprobs)[: len(tokens)] if logprobs is not None else None
        if not ended:
            return SequenceDelta(sequence.index, tokens, entries)
        reason, stop = self._reason(sequence, tokens[-1])
        if sequence.matcher is not None and reason is FinishReason.STOP and (failure := sequence.matcher.failure()) is not None:
            reason, stop, sequence.request.failure = FinishReason.ERROR, None, failure
        self._ledger.finish(sequence, reason.value)
        return SequenceDelta(sequence.index, tokens, entries, reason, stop)

    def _pooled_delta(self, sequence: Sequence) -> SequenceDelta:
        self._ledger.finish(sequence, FinishReason.STOP.value)
        return SequenceDelta(sequence.index, (), finish_reason=FinishReason.STOP)

    def _reason(self, sequence: Sequence, token: int) -> tuple[FinishReason, int | None]:
        slots, slot = self._ledger.slots, sequence.slot
        if not slots.stopped(np.array([slot]), np.array([token]))[0]:
            return FinishReason.LENGTH, None
        return FinishReason.STOP, token if token in sequence.request.params.stop_token_ids else None

    def _fail_bad_rows(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        failed = []
        for row in result.bad_rows:
            slot = int(plan.slots[plan.sampled][row])
            if self._ledger.slots.open[slot]:
                request = self._ledger.slots.sequence(slot).request
                self._ledger.counters["corrupted"] += 1
                request.failure = _corruption(request)
                told = request.failure or "the model gave NaN for this request"
                failed.append(end_request(self._ledger, request, FinishReason.ERROR, told))
        return failed

    def _fail_unseen(self, result: StepResult) -> list[RequestDelta]:
        """Before pages are indexed: those of requests with such an item hold nothing."""
        failed = []
        for digest, (why, refused) in result.unseen.items():
            assert self._ledger.media is not None
            self._ledger.media.lose(digest)
            brought = {s.request.id: (s.request, i) for s in self._ledger.running for i in s.request.source.media if i.digest == digest}
            for request, item in brought.values():
                told = f"the model's encoder failed on {_AN.get(item.modality, 'an item')} of this request: {why}"
                request.failure = f"{told}; send another" if refused else None
                failed.append(end_request(self._ledger, request, FinishReason.ERROR, told))
        return failed

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        for row, logprobs in result.prompt_logprobs.items():
            slot = int(plan.slots[row])
            if not self._ledger.slots.open[slot]:
                continue
            sequence = self._ledger.slots.sequence(slot)
            collected = sequence.request.prompt_logprobs
            # A preempted prompt is computed again: positions that are already here are skipped.
            if sequence.wants_prompt_logprobs and collected is not None:
                missing = len(sequence.request.source.prompt) - 1 - len(collected)
                done = len(collected) - int(plan.starts[row])
                collected.extend(as_logprobs(logprobs)[done : done + missing])


def _corruption(request: Request) -> str | None:
    """What is wrong with a request for which the model gave NaN, where it brought numbers of its own."""
    if not request.source.media:
        return None
    what = "embeddings" if not request.source.spoken else " and ".join(sorted({item.modality for item in request.source.media}))
    return f"the model makes NaN of the {what} of this request; send others"


def is_plain(sequence: Sequence) -> bool:
    """Whether its next token can cross without an object."""
    request = sequence.request
    return len(request.sequences) == 1 and request.params.logprobs is None and request.source.beam_width == 0


def as_logprobs(rows: RowLogprobs) -> tuple[TokenLogprobs, ...]:
    columns = (rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist(), rows.top_ids.tolist(), rows.top_logprobs.tolist())
    return tuple(
        TokenLogprobs(token, logprob, rank, tuple(ids), tuple(values)) for token, logprob, rank, ids, values in zip(*columns, strict=True)
    )


def _request_delta(request: Request, deltas: list[SequenceDelta], error: str | None = None) -> RequestDelta:
    """A first delta also brings what is known of the prompt."""
    first, request.answered = not request.answered, True
    return RequestDelta(
        request.id,
        tuple(deltas),
        finished=not request.unfinished,
        cached_tokens=request.cached_tokens if first else 0,
        prompt_logprobs=tuple(request.prompt_logprobs) if first and request.prompt_logprobs is not None else None,
        error=error or request.failure,
        refused=request.failure is not None,
        pooled=request.pooled,
        queued=request.queued if first else 0.0,
    )


def end_sequence(ledger: Ledger, sequence: Sequence, reason: FinishReason) -> RequestDelta:
    """End one sequence now, and say so; the others go on."""
    ledger.finish(sequence, reason.value)
    return _request_delta(sequence.request, [SequenceDelta(sequence.index, (), finish_reason=reason)])


def end_request(ledger: Ledger, request: Request, reason: FinishReason, error: str | None = None) -> RequestDelta:
    """End all its sequences now, and say so."""
    if request.beams is not None:
        indices = list(range(request.source.params.n))
    else:
        indices = [sequence.index for sequence in request.sequences if sequence.live]
    ledger.close(request, [reason.value] * len(indices))
    return _request_delta(request, [SequenceDelta(index, (), finish_reason=reason) for index in indices], error)
