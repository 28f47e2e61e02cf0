"""What the steady path reads of running sequences: arrays indexed by slot, so that a step costs no Python per request."""

from __future__ import annotations

import numpy as np
from pagoda.hal.errors import CapacityError
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import BoolArray, IntArray
from pagoda.serving.engine.sequence import NO_SLOT, Sequence
from pagoda.serving.engine.spec.config import MOST_DRAFTS

NEVER = 2**31 - 1
"""A length that no sequence has."""


class Slots:
    """Per slot, `[S]`:

    Attributes:
        tokens: `[S, L]`, prompt and output as far as the host knows them.
        known: how many of them. total: known, and those that steps in flight will sample.
        computed: positions whose KV is in pages once the steps in flight have run. committed: the same of committed steps.
        prompt: prompt length. limit: length at which the sequence ends. floor: shortest length at which a stop id counts.
        stops: `[S, K]` ids that end it, −1 where fewer.
        drafted: drafts of the step that is planned, which lie in `tokens` after the known ones; jumped: what a grammar forces, so that they
            are no guesses. drafting: all rows may have drafts.
        follows: a grammar says what may come. skips: where that is one token, none need be sampled.
        turn: the length from which a grammar has something to say about a row that goes free until then; frees: a grammar that lets go.
        in_flight: steps in flight that hold the slot.
        adapter: device slot of the sequence's adapter, −1 for none. media: end of its last media item, 0 for none.
        indexed: units of the hash chain that are in the prefix index.
        active: may be planned. open: takes sampled tokens. bound: sits out until its last token is known.
        searching: a beam, whose next token the search chooses and not the sampler.
        bursts: the host need not look at its tokens between steps, nor do they need work whose amount differs from step to step.
        plain: a sampled token is all there is to say to its client. ids: request ids. sequences: the sequences.
    """

    def __init__(self, count: int, longest: int) -> None:
        self.count = count
        self.tokens: IntArray = np.zeros((count, longest), np.int32)
        self.known, self.total, self.computed, self.committed = (np.zeros(count, np.int32) for _ in range(4))
        self.prompt, self.limit, self.floor, self.in_flight, self.indexed = (np.zeros(count, np.int32) for _ in range(5))
        self.adapter: IntArray = np.full(count, -1, np.int32)
        self.media: IntArray = np.zeros(count, np.int32)
        self.drafted: IntArray = np.zeros(count, np.int32)
        self.drafting = False
        self.follows, self.jumped, self.skips, self.frees = (np.zeros(count, np.bool_) for _ in range(4))
        self.turn: IntArray = np.full(count, NEVER, np.int32)
        self.turns = False
        self.stops: IntArray = np.full((count, 1), -1, np.int32)
        self.active, self.open, self.bound, self.searching, self.plain, self.bursts = (np.zeros(count, np.bool_) for _ in range(6))
        self.ids = np.empty(count, object)
        self.sequences: list[Sequence | None] = [None] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence, computed: int, adapter: int = -1) -> int:
        """Give the sequence a slot, with `computed` of its tokens in pages; `adapter`: the device slot of its adapter."""
        if not self._free:
            raise CapacityError(f"all {self.count} slots are taken", asked=1, available=0)
        slot = self._free.pop()
        source, params = sequence.request.source, sequence.request.params
        length, prompt = len(sequence.tokens), len(source.prompt)
        self.tokens[slot, :length] = sequence.tokens
        self.known[slot] = self.total[slot] = length
        self.computed[slot] = self.committed[slot] = computed
        self.prompt[slot], self.limit[slot] = prompt, sequence.limit
        self.floor[slot] = min(prompt + params.min_tokens, sequence.limit)
        self.in_flight[slot] = self.drafted[slot] = 0
        self.jumped[slot] = False
        self.skips[slot] = params.unedited and not self.drafting
        self.indexed[slot] = 0
        self.adapter[slot] = adapter
        self.media[slot] = source.media[-1].end if source.media else 0
        self.active[slot] = self.open[slot] = True
        self.searching[slot] = source.beam_width > 0
        self._set_grammar(slot, sequence.request.grammar is not None, params, length)
        self.bound[slot] = self.follows[slot] or self._sits_out(params, source)
        self.plain[slot] = False
        self.bursts[slot] = not self.bound[slot] and params.unedited
        self.ids[slot] = source.request_id
        self._set_stops(slot, (*params.stop_token_ids, *(() if params.ignore_eos else source.eos_ids)))
        self.sequences[slot], sequence.slot = sequence, slot
        return slot

    def follow_due(self, slots: IntArray) -> None:
        """Those of these slots whose turn has come follow their grammars from here on."""
        if self.turns and len(due := slots[self.total[slots] >= self.turn[slots]]):
            self.turn[due], self.follows[due], self.bound[due], self.bursts[due] = NEVER, True, True, False

    def release(self, slot: int) -> None:
        """Its grammar has nothing more to say, and no step with drafts of it is in flight."""
        source = self.sequence(slot).request.source
        params = self.sequence(slot).request.params
        self.follows[slot] = False
        self.bound[slot] = self._sits_out(params, source)
        self.bursts[slot] = not self.bound[slot] and params.unedited

    def _set_grammar(self, slot: int, grammar: bool, params: SamplingParams, length: int) -> None:
        """What binds after a number of tokens alone does so from there on; where rows have drafts, from where these reach it."""
        structured = params.structured_outputs
        grace = structured.grace if structured is not None and grammar else 0
        turn = min(int(self.prompt[slot]) + grace - self.drafting * MOST_DRAFTS, NEVER)
        self.frees[slot] = structured is not None and structured.free
        self.follows[slot] = grammar and length >= turn
        self.turn[slot] = turn if length < turn and grace else NEVER
        self.turns |= bool(grace)

    def _sits_out(self, params: SamplingParams, source: EngineRequest) -> bool:
        return bool(params.bad_words_token_ids) or source.beam_width > 0 or self.drafting

    def give_back(self, sequence: Sequence) -> None:
        """The sequence keeps its tokens and loses the slot."""
        slot = sequence.slot
        sequence.tokens = self.tokens[slot, : self.known[slot]].copy()
        self.sequences[slot], sequence.slot, self.ids[slot] = None, NO_SLOT, None
        self.active[slot] = self.open[slot] = False
        self.adapter[slot] = -1
        self._free.append(slot)

    def sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def stopped(self, slots: IntArray, tokens: IntArray) -> BoolArray:
        """Which of these slots end by their newest token, already counted in `known`."""
        result: BoolArray = (tokens[:, None] == self.stops[slots]).any(1) & (self.known[slots] >= self.floor[slots])
        return result

    def _set_stops(self, slot: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(ids)] = ids
