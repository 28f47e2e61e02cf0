"""Transformers modules that a step of several requests cannot go through: each text is run by itself, as transformers would.

For models that answer with vectors or scores a text is a prompt. A model that generates is given the whole text again for every token:
what lies on its pages are the texts' token ids. That costs a prefill a token, and works for every model that transformers has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from pagoda.hal.errors import ModelError
from pagoda.hal.kv import CacheKind, LayerCache, LayerPages, StatePages
from pagoda.hal.table import KernelTable
from pagoda.models.adapters.slots import AdapterSlots
from pagoda.models.bridge.encoder import BridgedEncoder, told_of_media
from pagoda.models.bridge.module import Module
from pagoda.models.bridge.probe import head
from pagoda.models.bridge.spec import BridgeSpec
from pagoda.models.encoding import EncoderBatch
from pagoda.models.loaded import Loaded
from pagoda.models.media import Encoder, MediaFacts
from pagoda.models.model import ModelFacts, ModelInputs, ModelOutput
from pagoda.ops.attention import PagedBatch


def kept_of(media: MediaFacts | None) -> LayerCache:
    """What lies on pages: a token's id, in float32 (exact up to 16 million); where a model takes media also whether an embedding stands for
    it, its positions, and the embedding."""
    return LayerCache(CacheKind.FULL, 1, 1 if media is None else 2 + media.axes + media.row_width, 0, "float32")


class TextModel:
    """Implements `models.model.Model` on one rank: what both kinds share.

    Args:
        module: None for a description alone. refill: reads the weights again into their places.
    """

    facts: ModelFacts

    def __init__(
        self, spec: BridgeSpec, table: KernelTable | None, facts: ModelFacts | None = None, module: Module | None = None,
        refill: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.spec, self._table, self._module, self.refill = spec, table, module, refill
        if facts is not None:
            self.facts = facts
        self.adapters, self.loaded = AdapterSlots(), Loaded()
        sees = module is not None and spec.media is not None
        self.encoder: Encoder | None = BridgedEncoder(module, spec.body, spec.top) if sees else None
        if module is not None:
            self.loaded.add([*module.parameters(), *module.buffers()])
            taken = inspect.signature(module.forward).parameters
            self._options = {"use_cache": False} if "use_cache" in taken else {}
            self._keeps = {"logits_to_keep"} & set(taken)

    def page_sizes(self) -> tuple[int, ...]:
        """All that the device has: no kernel reads these pages."""
        return self._table.info.limits.page_sizes if self._table is not None else ()

    def bind(self, pages: Sequence[LayerPages | StatePages | None], group_of_layer: Sequence[int], page_sizes: Sequence[int]) -> None:
        """See `Model.bind`."""

    def plan(self, groups: tuple[PagedBatch, ...], buffers: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """There is nothing to plan."""
        return ()

    def forward(self, inputs: ModelInputs) -> ModelOutput:
        """Rows of every token: hidden states, scores, or logits."""
        if inputs.taps:
            raise ModelError("a model that runs through transformers gives no hidden states of layers")
        return ModelOutput(self._rows(inputs))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows are logits already."""
        return hidden

    def pool(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows are vectors or scores already."""
        return hidden.float()

    def encode(self, batch: EncoderBatch) -> None:
        raise ModelError(f"{self.facts.architecture} runs through transformers and has no encoder")

    def _rows(self, inputs: ModelInputs) -> torch.Tensor:
        raise NotImplementedError

    def _run(self, ids: torch.Tensor, **options: Any) -> Any:
        return self._module(input_ids=ids[None], **self._options, **options)


class PooledTexts(TextModel):
    """Of models that answer with vectors or scores; the scores of a whole text stand in each of its rows."""

    def _rows(self, inputs: ModelInputs) -> torch.Tensor:
        assert inputs.segments is not None
        bounds = inputs.segments.start.tolist() if inputs.segments.bounds is None else inputs.segments.bounds.tolist()
        ids = inputs.token_ids.long()
        rows = [self.of_text(ids[first:end]) for first, end in pairwise(bounds) if end > first]
        padding = len(ids) - sum(map(len, rows))
        return torch.cat([*rows, rows[0].new_zeros(padding, rows[0].shape[1])])

    def of_text(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `[T, width]` of one text."""
        pooler = self.facts.pooler
        assert pooler is not None
        if pooler.task == "embed":
            hidden: torch.Tensor = first_of(self._run(ids), "last_hidden_state")[0]
            return hidden
        scores = first_of(self._run(self._ended(ids)), "logits")[0]
        return scores if pooler.kind == "all" else scores.expand(len(ids), -1)

    def _ended(self, ids: torch.Tensor) -> torch.Tensor:
        """Encoder-decoders score the state at the end token; a text without one gets it."""
        config = self._module.config
        if not getattr(config, "is_encoder_decoder", False) or (ids == config.eos_token_id).any():
            return ids
        return torch.cat([ids, ids.new_tensor([config.eos_token_id])])


class RecomputedTexts(TextModel):
    """Of models that generate: pages hold token ids, and every step runs the whole texts."""

    _pages: torch.Tensor
    _size: int

    def bind(self, pages: Sequence[LayerPages | StatePages | None], group_of_layer: Sequence[int], page_sizes: Sequence[int]) -> None:
        own = pages[0]
        if isinstance(own, LayerPages):
            self._pages = own.k
        self._size = page_sizes[group_of_layer[0]]

    def _rows(self, inputs: ModelInputs) -> torch.Tensor:
        batch, ids = inputs.groups[0], inputs.token_ids
        self._pages[batch.slots // self._size, batch.slots % self._size, 0] = self._numbers(inputs)
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        rows = []
        for row, (first, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            if end > first:
                pages = self._pages[batch.block_table[row].long()]
                rows.append(self._of_row(inputs, row, pages[..., 0, :].flatten(0, 1)[:length], end - first))
        padding = len(ids) - sum(map(len, rows))
        return torch.cat([*rows, rows[0].new_zeros(padding, rows[0].shape[1])])

    def _numbers(self, inputs: ModelInputs) -> torch.Tensor:
        """What lies on pages of each token, see `kept_of`."""
        ids, media = inputs.token_ids.float()[:, None], self.spec.media
        if media is None:
            return ids
        numbers = torch.cat([ids, ids.new_zeros(len(ids), 1 + media.axes + media.row_width)], dim=1)
        numbers[:, 2 : 2 + media.axes] = inputs.positions.expand(media.axes, -1).t().float()
        if inputs.embeddings is not None:
            rows, values = inputs.embeddings
            numbers[rows, 1], numbers[rows, 2 + media.axes :] = 1.0, values.float()
        return numbers

    def _of_row(self, inputs: ModelInputs, row: int, numbers: torch.Tensor, last: int) -> torch.Tensor:
        return self._of_text(numbers, last)

    def _of_text(self, numbers: torch.Tensor, last: int) -> torch.Tensor:
        ids, media = numbers[:, 0].long(), self.spec.media
        if media is None:
            return self.of_text(ids, last)
        rows, body = numbers[:, 1].nonzero()[:, 0], self._module.get_submodule(self.spec.body)
        options: dict[str, Any] = {"input_ids": ids[None]}
        if len(rows):
            options = told_of_media(body, self.spec.width, ids, rows, numbers[rows, 2 + media.axes :])
        positions = numbers[:, 2 : 2 + media.axes].t().long()[:, None] + self.spec.first_position
        hidden = body(**options, position_ids=positions if media.axes > 1 else positions[0], use_cache=False).last_hidden_state
        return head(self._module, self.spec.top, hidden[:, -last:])[0]

    def of_text(self, ids: torch.Tensor, last: int) -> torch.Tensor:
        """Logits `[last, vocab]` of the last tokens of one text."""
        if self.spec.media is not None:
            numbers = ids.new_zeros(len(ids), 2 + self.spec.media.axes, dtype=torch.float32)
            numbers[:, 0], numbers[:, 2:] = ids, torch.arange(len(ids), device=ids.device)[:, None]
            return self._of_text(numbers, last)
        logits: torch.Tensor = first_of(self._run(ids, **dict.fromkeys(self._keeps, last)), "logits")[0]
        return logits[-last:]


def first_of(output: Any, name: str) -> Any:
    """By name, or the first of what a module gave."""
    found = getattr(output, name, None)
    return output[0] if found is None else found
