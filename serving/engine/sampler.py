"""From logits to tokens on the device: masks and edits, then penalties, then one draw a row; logprobs are of the raw logits, or of those
that are drawn by, or are these logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from pagoda.hal.device import Device
from pagoda.hal.memory import MemoryKind
from pagoda.hal.table import KernelTable
from pagoda.ops.sampling import SamplingFacts, SamplingRows, processed_logits
from pagoda.serving.engine.batch import StepBatch
from pagoda.serving.engine.params import LogprobsMode
from pagoda.serving.engine.plan import Admission
from pagoda.serving.engine.rare_columns import SPLIT
from pagoda.serving.engine.settings import Use

OPS = ("sample", "penalize", "apply_token_bitmask", "top_logprobs")
"""The primitives of sampling that every device has a use for."""

_APART = {"apply_token_bitmask", "sample"}
"""What `masked_sample` does at once."""


def sampling_facts(vocab: int, dtype: str = "float32") -> SamplingFacts:
    """Their facts: what is added to is float32 whatever the model computes in; masks and `sample` take logits as they come."""
    return SamplingFacts(dtype, vocab)


def masks_inside(table: KernelTable, vocab: int) -> bool:
    """Whether masks may go to `masked_sample`: a kernel knows it, and no other was asked for by name."""
    return not _APART & table.policy.explicit.keys() and table.lacks("masked_sample", sampling_facts(vocab)) is None


class Logprobs(NamedTuple):
    """Of N tokens, on the device: own logprob `[N]` and rank `[N]`, top-k logprobs and ids `[N, k]`."""

    own: torch.Tensor
    rank: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


class Sampled(NamedTuple):
    """`tokens` `[S]` int64; `bad` `[S]` bool: the row's logits held NaN (both int32 behind a replay); logprobs of the rows that asked; of
    replays alone `words` `[K, 2, rows]` int32: tokens and `bad` of K steps in one piece."""

    tokens: torch.Tensor
    bad: torch.Tensor
    logprobs: Logprobs | None = None
    words: torch.Tensor | None = None


class Sampler:
    """Samples for one rank. Ranks of a tensor-parallel group sample the same tokens from the same logits.

    Args:
        device: where logits lie.
        table: resolves `OPS` for `vocab` float32 logits.
        slots: number of slots.
        logprobs: what stands for those of sampled tokens; those of prompts are always the model's own.

    Attributes:
        masks_inside: see there; a step with masks brings one for each row that it samples.
    """

    def __init__(self, device: Device, table: KernelTable, vocab: int, slots: int, logprobs: LogprobsMode = "raw_logprobs") -> None:
        self.masks_inside = masks_inside(table, vocab)
        self._table, self._vocab, self._mode = table, vocab, logprobs
        self._kinds: dict[tuple[str, torch.dtype], Callable[..., Any]] = {}
        self._penalize, self._top_logprobs = (self._kernel(op, torch.float32) for op in ("penalize", "top_logprobs"))
        self._counts = TokenCounts(device, vocab, slots)

    def state(self) -> tuple[torch.Tensor, ...]:
        """Tensors that sampling moves on."""
        return self._counts.state()

    def admit(self, admission: Admission) -> None:
        """Set up what penalties need of the slot."""
        params = admission.params
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            self._counts.admit(admission)

    def __call__(self, logits: torch.Tensor, batch: StepBatch) -> Sampled:
        """logits `[S, V]` → a token a row; masks may have been laid over them where they are not read beside them."""
        edited = self._edited(logits, batch)
        tokens, bad = self.draw(edited, batch)
        if batch.use & Use.PENALTY:
            rows = batch.views["penalty_rows"]
            self._counts.add(self._penalty_slots(batch), tokens[rows], _accepted(tokens, batch)[rows])
        logprobs = None
        if batch.use & Use.LOGPROBS:
            rows = batch.views["logprob_rows"]
            source = logits[rows] if self._mode.startswith("raw") else self._processed(edited, rows, batch)
            logprobs = self.logprobs(source, tokens[rows], batch.top_logprobs)
            if self._mode.endswith("logits"):
                logprobs = _as_logits(logprobs, source, tokens[rows])
        return Sampled(tokens, bad, logprobs)

    def reads_masks(self, batch: StepBatch) -> bool:
        """Whether the step's masks are read beside the logits: nothing else changes these or asks what they are."""
        return self.masks_inside and batch.use & SPLIT == Use.ALLOWED and "masks" in batch.views

    def draw(self, logits: torch.Tensor, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """One token a row, and whether the row holds NaN; nothing here depends on how many rows want what, so that it can be captured."""
        rows = _settings(batch) if batch.use & Use.RANDOM else _GREEDY
        if self.reads_masks(batch):
            return self._kernel("masked_sample", logits.dtype)(logits, batch.views["masks"], rows)
        return self._kernel("sample", logits.dtype)(logits, rows)

    def _processed(self, edited: torch.Tensor, rows: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        return processed_logits(edited[rows], _settings(batch, rows)) if batch.use & Use.RANDOM else edited[rows]

    def _kernel(self, op: str, dtype: torch.dtype) -> Callable[..., Any]:
        if (op, dtype) not in self._kinds:
            facts = sampling_facts(self._vocab, str(dtype).removeprefix("torch."))
            self._kinds[op, dtype] = self._table.resolve(op, facts).run
        return self._kinds[op, dtype]

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
        """Of `tokens` `[N]` under `logits` `[N, V]`."""
        return Logprobs(*self._top_logprobs(logits.float(), tokens, k))

    def _edited(self, logits: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        views = batch.views
        if self.reads_masks(batch) or not any(name in views for name in ("mask_rows", "edit_rows", "penalty_rows")):
            return logits
        # Masks alone are laid over the logits where they are: nobody reads the raw ones again but logprobs.
        if batch.use & Use.LOGPROBS or "edit_rows" in views or "penalty_rows" in views:
            logits = logits.to(torch.float32, copy=True)
        if "mask_rows" in views:
            logits = self._masked(logits, batch)
        if "edit_rows" in views:
            logits.index_put_((views["edit_rows"], views["edit_ids"]), views["edit_values"], accumulate=True)
        if "penalty_rows" in views:
            rows = views["penalty_rows"]
            prompt, counts = self._counts.of(self._penalty_slots(batch))
            if "path_rows" in views:  # drafts count for what follows them
                times = torch.ones_like(views["path_ids"], dtype=torch.int32)
                counts.index_put_((views["path_rows"], views["path_ids"]), times, accumulate=True)
            settings = (views["repetition"], views["presence"], views["frequency"])
            logits[rows] = self._penalize(logits[rows], prompt, counts, *settings)
        return logits

    def _masked(self, logits: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        rows, masks = batch.views["mask_rows"], batch.views["masks"]
        if len(rows) == len(logits):  # each row has one
            return self._kernel("apply_token_bitmask", logits.dtype)(logits, masks)
        real = slice(len(rows)) if len(rows) == batch.num_samples else rows
        logits[real] = self._kernel("apply_token_bitmask", logits.dtype)(logits[real], masks)
        return logits

    def _penalty_slots(self, batch: StepBatch) -> torch.Tensor:
        return batch.views["sample_slots"][batch.views["penalty_rows"]]


def _as_logits(found: Logprobs, logits: torch.Tensor, tokens: torch.Tensor) -> Logprobs:
    """The same tokens with their `logits` `[N, V]`."""
    own = logits.gather(1, tokens.long()[:, None])[:, 0].float()
    return found._replace(own=own, top=logits.gather(1, found.top_ids.long()).float())


def _accepted(tokens: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """`[S]` int32, 1 for the samples that count: those after known tokens, and after drafts that were sampled themselves."""
    views = batch.views
    if "sample_before" not in views:
        return torch.ones_like(tokens, dtype=torch.int32)
    before, draft = views["sample_before"], views["sample_draft"]
    right = (draft < 0) | (draft == tokens[before])
    kept = draft < 0
    for _ in range(int(batch.samples.depths.max())):
        kept = right & (kept[before] | (draft < 0))
    return kept.int()


class TokenCounts:
    """Which tokens each slot's prompt holds and how often each was generated; memory only for slots that ever had penalties."""

    def __init__(self, device: Device, vocab: int, slots: int) -> None:
        self._device = device
        self._vocab = vocab
        self._place = np.full(slots + 1, -1, np.int64)
        self._place_there = torch.full((slots + 1,), 0, dtype=torch.int64, device=device.torch_device)
        self._used = 0
        self._prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if device.graphs.policy.static_shapes:  # nothing may grow, and rows that pad have a place too
            self._grow(slots + 1)
            self._place = np.arange(slots + 1)
            self._place_there.copy_(torch.arange(slots + 1))

    def state(self) -> tuple[torch.Tensor, ...]:
        """What `add` changes."""
        return () if self._counts is None else (self._counts,)

    def admit(self, admission: Admission) -> None:
        """Count what the sequence has so far."""
        there, place = self._device.torch_device, torch.tensor([self._place_of(admission.slot)])
        assert self._prompt is not None and self._counts is not None
        prompt = np.zeros((1, self._vocab), np.bool_)
        prompt[0, list(admission.prompt) if admission.spoken else []] = True
        counts = np.bincount(np.array(admission.output, np.int64), minlength=self._vocab).astype(np.int32)[None]
        # Whole rows, whose shapes depend on nothing.
        self._prompt.index_copy_(0, place.to(there), torch.from_numpy(prompt).to(there))
        self._counts.index_copy_(0, place.to(there), torch.from_numpy(counts).to(there))

    def of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(prompt mask `[P, V]`, counts `[P, V]`) of slots `[P]` on the device."""
        assert self._prompt is not None and self._counts is not None
        place = self._place_there[slots]
        return self._prompt[place], self._counts[place]

    def add(self, slots: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor) -> None:
        """Count a token more for each of these slots, 0 or 1 times."""
        assert self._counts is not None
        place = self._place_there[slots]
        self._counts.index_put_((place, tokens), times, accumulate=True)

    def _place_of(self, slot: int) -> int:
        if self._place[slot] < 0:
            if self._prompt is None or self._used == len(self._prompt):
                self._grow(max(4, 2 * self._used))
            self._place[slot] = self._used
            self._place_there[slot] = self._used
            self._used += 1
        return int(self._place[slot])

    def _grow(self, places: int) -> None:
        alloc = self._device.memory.alloc
        prompt = alloc(MemoryKind.WORK, (places, self._vocab), torch.bool)
        counts = alloc(MemoryKind.WORK, (places, self._vocab), torch.int32)
        if self._prompt is not None and self._counts is not None:
            prompt[: self._used].copy_(self._prompt)
            counts[: self._used].copy_(self._counts)
        self._prompt, self._counts = prompt, counts


def _settings(batch: StepBatch, rows: torch.Tensor | None = None) -> SamplingRows:
    """Of all samples, or of some."""
    names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed", "position": "draws"}
    views: dict[str, Any] = {name: batch.views[view] if rows is None else batch.views[view][rows] for name, view in names.items()}
    return SamplingRows(**views, any_filter=bool(batch.use & Use.FILTER))


def _greedy_rows() -> SamplingRows:
    empty: Any = torch.empty(0)
    return SamplingRows(empty, empty, empty, empty, empty, empty, all_greedy=True, any_filter=False)


_GREEDY = _greedy_rows()
