"""The device's part of a step: token ids resolved, the layers, logits of sampled rows, the sample kept for the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pagoda.hal.device import Device
from pagoda.hal.memory import MemoryKind
from pagoda.models.model import Model, ModelInputs, ModelOutput
from pagoda.ops.attention import PagedBatch, Spans
from pagoda.serving.engine.batch import StepBatch
from pagoda.serving.engine.plan import Admission
from pagoda.serving.engine.sampler import Sampled, Sampler

NEVER = 2**62
"""A position that no prompt reaches."""


class StepTensors(NamedTuple):
    """What a step leaves on the device: the sample of the sampled rows, hidden states `[T, width]`, and those of tapped layers for the
    tokens that were asked for, `[L, N, width]` float32."""

    sampled: Sampled
    hidden: torch.Tensor
    taps: torch.Tensor | None
    routed: torch.Tensor | None = None


class Forward:
    """Steps of one rank, run as they are.

    Attributes:
        model: may be replaced between steps (wake).
        embeddings: the store of media's rows, where the model takes any.
        last_tokens: `[slots + 1]` int64, the last token sampled for each slot; padding rows leave theirs in the last place.
    """

    def __init__(self, device: Device, model: Model, sampler: Sampler, slots: int) -> None:
        self.device, self.model, self.sampler = device, model, sampler
        self.embeddings: torch.Tensor | None = None
        self.last_tokens = device.memory.alloc(MemoryKind.WORK, (slots + 1,), torch.int64).zero_()
        # Length of each slot's sequence when it began, for models whose angles follow it: any length within its epoch will do.
        by_length = model.facts.length_epochs is not None
        self._lengths = device.memory.alloc(MemoryKind.WORK, (slots + 1,), torch.int64).zero_() if by_length else None
        # Where the second text of each slot's prompt begins, for models that know types of tokens.
        typed = model.facts.types > 1
        self._seconds = device.memory.alloc(MemoryKind.WORK, (slots + 1,), torch.int64).fill_(NEVER) if typed else None

    def admit(self, admission: Admission) -> None:
        """A sequence begins, or begins again."""
        if self._lengths is not None:
            self._lengths[admission.slot] = len(admission.prompt) + len(admission.output)
        if self._seconds is not None and admission.pooling is not None:
            self._seconds[admission.slot] = NEVER if admission.pooling.second is None else admission.pooling.second

    def __call__(self, batch: StepBatch) -> StepTensors:
        groups = batch.groups()
        output = self.output(batch, groups, self.model.plan(groups))
        logits = self.logits(batch, output.hidden)
        sampled = self.nothing() if logits is None else self.sample(logits, batch)
        rows = batch.views.get("tap_rows")
        taps = torch.stack([tap[rows].float() for tap in output.taps]) if rows is not None else None
        routed = torch.stack(output.routed)[:, : batch.num_tokens] if batch.routed else None
        return StepTensors(sampled, output.hidden, taps, routed)

    def hidden(self, batch: StepBatch, groups: tuple[PagedBatch, ...], plans: tuple[Any, ...]) -> torch.Tensor:
        """The model's last hidden states; writes this step's K and V."""
        return self.output(batch, groups, plans).hidden

    def output(self, batch: StepBatch, groups: tuple[PagedBatch, ...], plans: tuple[Any, ...]) -> ModelOutput:
        """The same with those of the layers that the step taps."""
        views = batch.views
        ids = views["token_ids"]
        token_ids = torch.where(ids < 0, self.last_tokens[views["token_slots"]], ids)
        positions = views["positions"]
        lengths = self._lengths[views["token_slots"]] if self._lengths is not None else None
        positions = positions[0] if len(positions) == 1 else positions
        types = (positions >= self._seconds[views["token_slots"]]).long() if self._seconds is not None else None
        segments = batch.segments() if self.model.facts.whole_prompts else None
        inputs = ModelInputs(
            token_ids,
            positions,
            groups,
            plans,
            self._media(views),
            spans=Spans(views["span_rows"], views["span_first"], views["span_end"]) if "span_first" in views else None,
            taps=batch.taps,
            routed=batch.routed,
            adapters=views.get("adapters"),
            lengths=lengths,
            segments=segments,
            types=types,
        )
        return self.model.forward(inputs)

    def _media(self, views: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        rows = views.get("span_rows")
        if rows is None or self.embeddings is None:
            return None
        return rows, self.embeddings[views["span_sources"]]

    def logits(self, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor | None:
        """`[S, V]` of the sampled rows, None where there are none."""
        rows = batch.views.get("sample_rows")
        if rows is None:
            return None
        return self.model.logits(hidden if batch.every_row_sampled else hidden[rows])

    def sample(self, logits: torch.Tensor, batch: StepBatch) -> Sampled:
        """Sample, and keep the tokens where the next step finds them."""
        sampled = self.sampler(logits, batch)
        self.last_tokens[batch.views["sample_slots"]] = sampled.tokens
        return sampled

    def nothing(self) -> Sampled:
        """The sample of a step that samples no row."""
        empty = torch.empty(0, dtype=torch.int64, device=self.device.torch_device)
        return Sampled(empty, empty.bool())
