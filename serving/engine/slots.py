"""What the steady path reads of running sequences: arrays indexed by slot, so that a step costs no Python per request."""

from __future__ import annotations

import numpy as np
from pagoda.hal.errors import CapacityError
from pagoda.serving.engine.plan import BoolArray, IntArray
from pagoda.serving.engine.sequence import NO_SLOT, Sequence


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
        self.follows, self.jumped, self.skips = (np.zeros(count, np.bool_) for _ in range(3))
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
        self.prompt[slot], self.limit[slot], self.floor[slot] = prompt, sequence.limit, prompt + params.min_tokens
        self.in_flight[slot] = self.drafted[slot] = 0
        self.follows[slot], self.jumped[slot] = sequence.request.grammar is not None, False
        self.skips[slot] = params.unedited and not self.drafting
        self.indexed[slot] = 0
        self.adapter[slot] = adapter
        self.media[slot] = source.media[-1].end if source.media else 0
        self.active[slot] = self.open[slot] = True
        self.searching[slot] = source.beam_width > 0
        self.bound[slot] = params.bound or source.beam_width > 0 or self.drafting
        self.plain[slot] = False
        self.bursts[slot] = not self.bound[slot] and params.plain
        self.ids[slot] = source.request_id
        self._set_stops(slot, (*params.stop_token_ids, *(() if params.ignore_eos else source.eos_ids)))
        self.sequences[slot], sequence.slot = sequence, slot
        return slot

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
