"""Drafts by the model's own layer for several tokens (`models.ahead`), which reads the states that each step gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pagoda.hal.device import Device
from pagoda.hal.kv import LayerCache
from pagoda.models.ahead import Ahead, load_ahead
from pagoda.models.direct import DirectRun
from pagoda.models.loading.open import open_checkpoint
from pagoda.models.loading.reference import resolve
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.plan import FloatArray, IntArray
from pagoda.serving.engine.sizing import describe_model
from pagoda.serving.engine.spec.config import Mtp
from pagoda.serving.engine.spec.drafter import Draft, Drafter, DraftState, TokenStates
from pagoda.serving.engine.spec.make import make_drafter
from pagoda.serving.engine.target import open_target

LONGEST = 4096
"""Tokens of a sequence that drafts look back on at most; pages for as many are kept beside the engine's."""


def open_drafter(config: EngineConfig) -> Drafter | None:
    """The drafter that a configuration asks for, with its weights where it has any, on the first rank's device."""
    asked = config.speculation
    if not isinstance(asked, Mtp):
        return make_drafter(asked)
    target = open_target(config)
    description = describe_model(config, target)
    checkpoint = open_checkpoint(resolve(config.model, config.revision, cache=config.download_dir), config.load_format, config.hf_overrides)
    ahead = load_ahead(checkpoint, description, target.device, target.table)
    longest = min(config.max_model_len or description.facts.max_positions, LONGEST)
    layers = len(description.facts.caches)
    return AheadDrafter(ahead, target.device, layers - 1, asked.num_speculative_tokens, config.max_num_seqs, longest)


class AheadDrafter:
    """Chains: the first draft from a token's state and the next token, each further one from what the layer made of the one before it.

    Args:
        layer: whose states it reads. count: tokens to guess.
        slots, longest: sequences, and tokens of each, that it has pages for.
    """

    branches = False
    caches: tuple[LayerCache, ...] = ()

    def __init__(self, ahead: Ahead, device: Device, layer: int, count: int, slots: int, longest: int) -> None:
        self.wants: tuple[int, ...] = (layer,)
        model, self._last, self._normed = ahead
        self._device, self._count, self._longest = device, count, longest + count
        self._dtype = getattr(torch, model.facts.dtype)
        self._run = DirectRun(model, device, slots, self._longest)
        self._texts: dict[int, IntArray] = {}
        self._first: dict[int, int] = {}
        self._drafts: dict[int, IntArray] = {}

    def propose(self, state: DraftState) -> Draft:
        rows = [(slot, tokens, given) for slot, tokens, given in zip(state.slots.tolist(), state.tokens, state.hidden, strict=True)]
        self._guess([(slot, tokens, given) for slot, tokens, given in rows if given is not None])
        ids = np.full((len(rows), self._count), -1, np.int32)
        for row, ((slot, tokens, _), room) in enumerate(zip(rows, state.room.tolist(), strict=True)):
            if slot in self._drafts and np.array_equal(self._texts[slot], tokens):
                ids[row, :room] = self._drafts[slot][:room]
        chain = np.arange(-1, self._count - 1, dtype=np.int32)
        return Draft(ids, np.broadcast_to(chain, ids.shape).copy())

    def _guess(self, rows: Sequence[tuple[int, IntArray, TokenStates]]) -> None:
        if not rows:
            return
        fed = [self._fresh(slot, tokens, given) for slot, tokens, given in rows]
        slots, lengths = [slot for slot, _, _ in rows], [len(ids) for ids, _ in fed]
        states = torch.from_numpy(np.concatenate([states for _, states in fed])).to(self._device.torch_device, self._dtype)
        segments = [(slot, ids.tolist()) for slot, (ids, _) in zip(slots, fed, strict=True)]
        ends = torch.tensor(lengths, device=self._device.torch_device).cumsum(0) - 1
        drafts, states = self._after(segments, self._last(states), ends)
        known, found = [self._run.lengths[slot] for slot in slots], [drafts]
        every = torch.arange(len(slots), device=self._device.torch_device)
        for _ in range(self._count - 1):
            drafts, states = self._after([(slot, [draft]) for slot, draft in zip(slots, drafts.tolist(), strict=True)], states, every)
            found.append(drafts)
        for slot, length, draft in zip(slots, known, np.stack(found, axis=1), strict=True):
            self._run.lengths[slot] = length  # guesses are not known
            self._drafts[slot] = draft

    @torch.no_grad()
    def _after(self, segments: list[tuple[int, list[int]]], states: torch.Tensor, ends: torch.Tensor) -> tuple[IntArray, torch.Tensor]:
        """What follows each segment, and the state that it was read from."""
        output = self._run.step(segments, taps=(0,), states=states)
        best = self._run.model.logits(output.hidden[ends]).argmax(-1)
        return best.to("cpu", torch.int32).numpy(), (output.hidden if self._normed else output.taps[0])[ends]

    def _fresh(self, slot: int, tokens: IntArray, given: TokenStates) -> tuple[IntArray, FloatArray]:
        """Tokens to run, each the one after a state, and those states; what is kept of other texts in the slot is let go."""
        start, first, text = given.start, self._first.get(slot, 0), self._texts.get(slot, tokens[:0])
        kept = start - first
        same = 0 <= kept <= self._run.lengths[slot] and np.array_equal(text[: start + 1], tokens[: start + 1])
        ids, states = tokens[start + 1 :], given.states[0]
        if not same or kept + len(ids) + self._count > self._longest:
            ids, states = ids[-(self._longest // 2) :], states[-(self._longest // 2) :]
            first, kept = len(tokens) - 1 - len(ids), 0
        self._first[slot], self._texts[slot], self._run.lengths[slot] = first, tokens.copy(), kept
        return ids, states
