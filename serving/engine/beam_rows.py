"""Beam search in the scheduler: each beam is a bound sequence; when all of a request's beams have answered, the search turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pagoda.serving.engine.beams import BeamSearch, Candidate, Hypothesis
from pagoda.serving.engine.fork import fork_sequence, known_tokens
from pagoda.serving.engine.ledger import Ledger
from pagoda.serving.engine.messages import FinishReason, SequenceDelta, TokenLogprobs
from pagoda.serving.engine.plan import RowLogprobs
from pagoda.serving.engine.sequence import NO_SLOT, Request, Sequence, State


@dataclass(eq=False)
class Beams:
    """A request's search and its living beams.

    Attributes:
        answers: what the last step gave the beams that have answered. `logprobs`: entries that the client asked for, or None.
    """

    search: BeamSearch
    logprobs: int | None
    cumulative: dict[Sequence, float] = field(default_factory=dict)
    answers: dict[Sequence, RowLogprobs] = field(default_factory=dict)
    entries: dict[Sequence, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


def answer(ledger: Ledger, sequence: Sequence, logprobs: RowLogprobs) -> list[SequenceDelta]:
    """Take one beam's step. Returns the request's answers when the search is over, else nothing.

    A beam that was preempted meanwhile is computed again, so what it gave is dropped.
    """
    request, beams = sequence.request, sequence.request.beams
    if beams is None or sequence.state is not State.RUNNING:
        return []
    beams.answers[sequence] = logprobs
    if len(beams.answers) < len(request.sequences):
        return []
    return _turn(ledger, request, beams)


def _turn(ledger: Ledger, request: Request, beams: Beams) -> list[SequenceDelta]:
    search, parents, answers = beams.search, list(request.sequences), beams.answers
    beams.answers = {}
    prompt = len(request.source.prompt)
    length = len(known_tokens(ledger, parents[0])) + 1 - prompt
    turn = search.turn(
        (
            Candidate(beams.cumulative.get(parent, 0.0) + logprob, number, token)
            for number, parent in enumerate(parents)
            for token, logprob in zip(answers[parent].top_ids[0].tolist(), answers[parent].top_logprobs[0].tolist(), strict=True)
        ),
        last=prompt + length >= parents[0].limit,
    )
    entries = [_entry(beams, parents[one.beam], answers, one) for one in (*turn.ending, *turn.living)]
    search.complete(
        [_hypothesis(ledger, beams, parents[one.beam], one, length, entry) for one, entry in zip(turn.ending, entries, strict=False)]
    )
    if search.over(turn.living, length):
        return _finish(ledger, request, search)
    _branch(ledger, request, beams, parents, list(zip(turn.living, entries[len(turn.ending) :], strict=True)))
    return []


def _branch(
    ledger: Ledger, request: Request, beams: Beams, parents: list[Sequence], living: list[tuple[Candidate, tuple[TokenLogprobs, ...]]]
) -> None:
    """The first child of a beam goes on in its place, the others are forks; beams without a child are dropped."""
    firsts: dict[int, tuple[Candidate, tuple[TokenLogprobs, ...]]] = {}
    forks = [one for one in living if firsts.setdefault(one[0].beam, one) is not one]
    cumulative, entries = {}, {}
    for candidate, entry in forks:
        child = fork_sequence(ledger, parents[candidate.beam], candidate.token)
        cumulative[child], entries[child] = candidate.cumulative, entry
    for number, parent in enumerate(parents):
        if number not in firsts:
            ledger.drop(parent)
            continue
        candidate, entry = firsts[number]
        _append(ledger, parent, candidate.token)
        cumulative[parent], entries[parent] = candidate.cumulative, entry
    request.sequences = list(cumulative)
    beams.cumulative, beams.entries = cumulative, entries


def _append(ledger: Ledger, sequence: Sequence, token: int) -> None:
    slots, slot = ledger.slots, sequence.slot
    assert slot != NO_SLOT, "a beam that has answered runs"
    slots.tokens[slot, slots.known[slot]] = token
    slots.known[slot] += 1


def _entry(beams: Beams, parent: Sequence, answers: dict[Sequence, RowLogprobs], candidate: Candidate) -> tuple[TokenLogprobs, ...]:
    if beams.logprobs is None:
        return ()
    ids, values = answers[parent].top_ids[0].tolist(), answers[parent].top_logprobs[0].tolist()
    rank, top = ids.index(candidate.token), slice(beams.logprobs)
    entry = TokenLogprobs(candidate.token, values[rank], rank + 1, tuple(ids[top]), tuple(values[top]))
    return (*beams.entries.get(parent, ()), entry)


def _hypothesis(
    ledger: Ledger, beams: Beams, parent: Sequence, candidate: Candidate, length: int, entries: tuple[TokenLogprobs, ...]
) -> Hypothesis:
    tokens = np.append(known_tokens(ledger, parent)[len(parent.request.source.prompt) :], np.int32(candidate.token))
    score = beams.search.score(candidate.cumulative, length)
    return Hypothesis(score, candidate.cumulative, tuple(tokens.tolist()), candidate.token in beams.search.ends, entries)


def _finish(ledger: Ledger, request: Request, search: BeamSearch) -> list[SequenceDelta]:
    deltas = []
    for index, one in enumerate(search.finished[: request.source.params.n]):
        reason = FinishReason.STOP if one.stopped else FinishReason.LENGTH
        stop = one.tokens[-1] if one.stopped and one.tokens[-1] in request.params.stop_token_ids else None
        logprobs = one.logprobs if request.source.params.logprobs is not None else None
        deltas.append(SequenceDelta(index, one.tokens, logprobs, reason, stop, one.cumulative))
    ledger.close(request, [delta.finish_reason.value for delta in deltas if delta.finish_reason])
    return deltas
