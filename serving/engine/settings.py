"""How each running sequence wants its tokens, per slot, as host arrays: gathered by numpy into every step's columns."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.engine.plan import Admission, FloatArray, IntArray, LongArray

SEED_STEP = 0x9E3779B97F4A7C15
"""Distance between the random streams of a request's sequences."""


class Use:
    """What a slot needs of the sampler, as bits; a step does only what the union of its rows needs. Plain numbers: a step asks often."""

    RANDOM = 1
    FILTER = 2
    PENALTY = 4
    BIAS = 8
    MIN_TOKENS = 16
    BAD_WORDS = 32
    ALLOWED = 64
    LOGPROBS = 128
    PROMPT_LOGPROBS = 256


EDITS = Use.BIAS | Use.MIN_TOKENS | Use.BAD_WORDS


class Edits(NamedTuple):
    """Numbers added to single logits: `logits[rows[i], ids[i]] += values[i]`."""

    rows: LongArray
    ids: LongArray
    values: FloatArray


class SamplingSlots:
    """Per-slot settings. Arrays `[slots]` for what every row has, dictionaries for what few rows have."""

    def __init__(self, slots: int, vocab: int) -> None:
        self.vocab = vocab
        self.use: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.temperature: FloatArray = np.zeros(slots, np.float32)
        self.top_p: FloatArray = np.ones(slots, np.float32)
        self.min_p: FloatArray = np.zeros(slots, np.float32)
        self.top_k: IntArray = np.zeros(slots, np.int32)
        self.seed: LongArray = np.zeros(slots, np.int64)
        self.repetition: FloatArray = np.ones(slots, np.float32)
        self.presence: FloatArray = np.zeros(slots, np.float32)
        self.frequency: FloatArray = np.zeros(slots, np.float32)
        self.top_logprobs: IntArray = np.zeros(slots, np.int32)
        self.prompt_top_logprobs: IntArray = np.zeros(slots, np.int32)
        self.min_tokens: IntArray = np.zeros(slots, np.int32)
        self._bias: dict[int, tuple[LongArray, FloatArray]] = {}
        self._ends: dict[int, LongArray] = {}
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._allowed: dict[int, IntArray] = {}
        self._prompts: dict[int, LongArray] = {}
        self._outputs: dict[int, list[int]] = {}
        self._prompt_len: IntArray = np.zeros(slots, np.int32)

    def admit(self, admission: Admission) -> None:
        """Set a slot up, forgetting what was there."""
        slot, params = admission.slot, admission.params
        self._forget(slot)
        self.use[slot] = self._use(params, admission.eos_ids)
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = params.temperature, params.top_p, params.min_p
        self.top_k[slot] = params.top_k if params.top_k < self.vocab else 0
        self.seed[slot] = stream_seed(params.seed or 0, admission.sequence)
        self.repetition[slot], self.presence[slot] = params.repetition_penalty, params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.top_logprobs[slot] = params.logprobs or 0
        self.prompt_top_logprobs[slot] = params.prompt_logprobs or 0
        self.min_tokens[slot] = params.min_tokens
        self._prompt_len[slot] = len(admission.prompt)
        self._admit_rare(admission)

    def uses(self, slots: IntArray) -> int:
        """What any of these slots needs."""
        return int(np.bitwise_or.reduce(self.use[slots]))

    def rows_with(self, slots: IntArray, use: int) -> LongArray:
        """Indices into `slots` of those that need any of `use`."""
        return (self.use[slots] & use).nonzero()[0]

    def observe(self, slots: IntArray, starts: IntArray, lengths: IntArray, token_ids: IntArray) -> None:
        """Keep the generated tokens of rows with bad words: `token_ids` are a step's, of which a row has `lengths` from position `starts`.

        Drafts are kept with them: those that were not accepted are overwritten by the row's next tokens.
        """
        ends = np.cumsum(lengths)
        for row in self.rows_with(slots, Use.BAD_WORDS):
            slot = int(slots[row])
            index = int(starts[row]) - int(self._prompt_len[slot])
            tokens = token_ids[ends[row] - lengths[row] : ends[row]].tolist()[max(-index, 0) :]
            if tokens and tokens[0] >= 0:
                self._outputs[slot][max(index, 0) :] = tokens

    def edits(self, slots: IntArray, draws: IntArray, ahead: Seq[tuple[int, ...]] | None = None) -> Edits:
        """What bias, minimum lengths and bad words add to the logits of these slots' next tokens, the `draws`-th of each.

        `ahead`: the drafts before each of these tokens, the last of its outputs.
        """
        rows: list[LongArray] = []
        ids: list[LongArray] = []
        values: list[FloatArray] = []
        for row in self.rows_with(slots, EDITS):
            for token_ids, added in self._edits_of(int(slots[row]), int(draws[row]), ahead[row] if ahead is not None else ()):
                rows.append(np.full(len(token_ids), row, np.int64))
                ids.append(token_ids)
                values.append(added)
        if not rows:
            return Edits(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
        return Edits(np.concatenate(rows), np.concatenate(ids), np.concatenate(values))

    def masks(self, slots: IntArray, grammar_rows: LongArray, grammar: IntArray | None) -> tuple[LongArray, IntArray]:
        """Bitmasks of these slots and the rows they belong to: allowed token ids, combined with a grammar's masks."""
        allowed_rows = self.rows_with(slots, Use.ALLOWED)
        if not len(allowed_rows) and grammar is not None:
            return grammar_rows.astype(np.int64), grammar
        rows = np.union1d(allowed_rows, grammar_rows).astype(np.int64)
        masks = np.full((len(rows), (self.vocab + 31) // 32), -1, np.int32)
        for row in allowed_rows:
            masks[np.searchsorted(rows, row)] = self._allowed[int(slots[row])]
        if grammar is not None and len(grammar_rows):
            masks[np.searchsorted(rows, grammar_rows)] &= grammar
        return rows, masks

    def score_prompt(self, slots: IntArray, starts: IntArray) -> bool:
        """Whether any row wants logprobs of prompt tokens that follow its start."""
        wanting = (self.use[slots] & Use.PROMPT_LOGPROBS) != 0
        return bool((wanting & (starts + 1 < self._prompt_len[slots])).any())

    def next_prompt_tokens(self, slot: int, start: int, length: int) -> LongArray:
        """The prompt tokens that follow positions `start .. start + length` of a slot that wants prompt logprobs."""
        return self._prompts[slot][start + 1 : start + 1 + length]

    def _use(self, params: SamplingParams, eos_ids: tuple[int, ...]) -> int:
        random = params.temperature > 0
        wanted = (
            (Use.RANDOM, random),
            (Use.FILTER, random and (0 < params.top_k < self.vocab or params.top_p < 1 or params.min_p > 0)),
            (Use.PENALTY, params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty),
            (Use.BIAS, params.logit_bias),
            (Use.MIN_TOKENS, params.min_tokens and (eos_ids or params.stop_token_ids)),
            (Use.BAD_WORDS, params.bad_words_token_ids),
            (Use.ALLOWED, params.allowed_token_ids),
            (Use.LOGPROBS, params.logprobs is not None),
            (Use.PROMPT_LOGPROBS, params.prompt_logprobs is not None),
        )
        return sum(bit for bit, yes in wanted if yes)

    def _forget(self, slot: int) -> None:
        for rare in (self._bias, self._ends, self._bad_words, self._allowed, self._prompts, self._outputs):
            rare.pop(slot, None)  # type: ignore[attr-defined]

    def _admit_rare(self, admission: Admission) -> None:
        slot, params, use = admission.slot, admission.params, int(self.use[admission.slot])
        if use & Use.BIAS:
            ids, values = zip(*params.logit_bias.items())
            self._bias[slot] = (np.array(ids, np.int64), np.array(values, np.float32))
        if use & Use.MIN_TOKENS:
            self._ends[slot] = np.array(sorted({*admission.eos_ids, *params.stop_token_ids}), np.int64)
        if use & Use.BAD_WORDS:
            self._bad_words[slot] = params.bad_words_token_ids
            self._outputs[slot] = list(admission.output)
        if use & Use.ALLOWED:
            self._allowed[slot] = bitmask(params.allowed_token_ids, self.vocab)
        if use & Use.PROMPT_LOGPROBS:
            self._prompts[slot] = np.array(admission.prompt, np.int64)

    def _edits_of(self, slot: int, draw: int, ahead: tuple[int, ...]) -> list[tuple[LongArray, FloatArray]]:
        found = []
        if slot in self._bias:
            found.append(self._bias[slot])
        banned = [self._ends[slot]] if slot in self._ends and draw < self.min_tokens[slot] else []
        if slot in self._bad_words:
            banned.append(self._banned_words(slot, [*self._outputs[slot][: draw - len(ahead)], *ahead]))
        found += [(ids, np.full(len(ids), -np.inf, np.float32)) for ids in banned if len(ids)]
        return found

    def _banned_words(self, slot: int, output: list[int]) -> LongArray:
        last = {
            word[-1]
            for word in self._bad_words[slot]
            if len(word) == 1 or (len(output) >= len(word) - 1 and tuple(output[len(output) - len(word) + 1 :]) == word[:-1])
        }
        return np.array(sorted(last), np.int64)


def stream_seed(seed: int, sequence: int) -> int:
    """The seed of a request's `sequence`-th stream, as a signed 64-bit number."""
    mixed = (seed + sequence * SEED_STEP) % 2**64
    return mixed - 2**64 if mixed >= 2**63 else mixed


def bitmask(ids: tuple[int, ...], vocab: int) -> IntArray:
    """Bit i of word w is token 32w + i; int32 `[ceil(vocab / 32)]`."""
    bits = np.zeros((vocab + 31) // 32 * 32, np.uint8)
    bits[[token for token in ids if 0 <= token < vocab]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
