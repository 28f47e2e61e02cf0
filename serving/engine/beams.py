"""Beam search: which continuations live on, which are complete, and when no better one can come (as in transformers)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.hal.errors import RequestError
from pagoda.serving.engine.messages import EngineRequest, TokenLogprobs
from pagoda.serving.engine.params import MAX_LOGPROBS

MAX_LENGTH_PENALTY = 16.0
"""Above it a power of the length leaves the numbers that a float can hold."""


class Candidate(NamedTuple):
    """One more token for one beam: its sum of logprobs with the token, the beam's number, the token."""

    cumulative: float
    beam: int
    token: int


class Hypothesis(NamedTuple):
    """A complete answer, best by `score` = cumulative / length ** length_penalty; `stopped` by an end token, else by length."""

    score: float
    cumulative: float
    tokens: tuple[int, ...]
    stopped: bool
    logprobs: tuple[TokenLogprobs, ...] = ()


class Turn(NamedTuple):
    """What a step makes of its candidates: those that end their answer, and those that live on (none: the search is over)."""

    ending: list[Candidate]
    living: list[Candidate]


@dataclass
class BeamSearch:
    """The rules of one search; it knows numbers only.

    Attributes:
        width: beams. ends: tokens that complete an answer. length_penalty: power of the length that divides scores.
        finished: the best `width` complete answers, best first.
    """

    width: int
    ends: frozenset[int]
    length_penalty: float
    finished: list[Hypothesis] = field(default_factory=list)

    @property
    def looked_at(self) -> int:
        """Candidates to ask of each beam, so that `width` are left when all that can end do."""
        return max(2, 1 + len(self.ends)) * self.width

    def turn(self, candidates: Iterable[Candidate], last: bool) -> Turn:
        """Sort a step's candidates; `last` says that no room is left after their token."""
        best = sorted(candidates, key=lambda one: -one.cumulative)[: self.looked_at]
        ending = [one for one in best[: self.width] if last or one.token in self.ends]
        living = [] if last else [one for one in best if one.token not in self.ends][: self.width]
        return Turn(ending, living)

    def complete(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Keep the best of them and of those before."""
        self.finished = sorted([*self.finished, *hypotheses], key=lambda one: -one.score)[: self.width]

    def score(self, cumulative: float, length: int) -> float:
        return cumulative / float(length**self.length_penalty)

    def over(self, living: Sequence[Candidate], length: int) -> bool:
        """Whether none of the living, of `length` tokens now, can do better than the worst that is complete."""
        if not living:
            return True
        return len(self.finished) == self.width and self.score(living[0].cumulative, length) <= self.finished[-1].score


def start_search(request: EngineRequest, slots: int) -> BeamSearch:
    """The search that a request asks for. Raises `RequestError` naming the field that cannot work."""
    params = request.params
    ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else request.eos_ids)))
    search = BeamSearch(request.beam_width, ends, request.length_penalty)
    widest = min(slots, MAX_LOGPROBS // max(2, 1 + len(ends)))
    if request.beam_width > widest:
        raise RequestError(f"beam_width={request.beam_width} is too large: this engine runs at most {widest} beams", param="beam_width")
    if params.n > request.beam_width:
        raise RequestError(f"n={params.n} answers of beam_width={request.beam_width}: n must not be larger", param="n")
    if not -MAX_LENGTH_PENALTY <= request.length_penalty <= MAX_LENGTH_PENALTY:
        allowed = f"it must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise RequestError(f"length_penalty={request.length_penalty:g} is out of range: {allowed}", param="length_penalty")
    penalties = {name: getattr(params, name) for name in ("presence_penalty", "frequency_penalty")}
    if any(penalties.values()) or params.repetition_penalty != 1:
        raise RequestError("penalties are not defined for beam search: leave them at their defaults", param="repetition_penalty")
    return search
