"""Runs a model without an engine: pages and batches made by hand, for comparisons and for looking into a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pagoda.hal.device import Device
from pagoda.hal.kv import CacheGroup, CacheKind, KVLayout, LayerCache, LayerPages, StatePages
from pagoda.models.model import Model, ModelInputs, ModelOutput
from pagoda.ops.attention import PagedBatch
from pagoda.ops.segment_attention import Segments


class DirectRun:
    """`count` sequences of at most `max_length` tokens, each with pages of its own.

    Args:
        model: loaded; it is bound to new pages here.
        page_size: tokens per page; the model's first choice when None.

    `pools` are the layout and the pages of each cache group, `page_ids` those of one sequence.
    """

    def __init__(self, model: Model, device: Device, count: int, max_length: int, page_size: int | None = None) -> None:
        self.model = model
        self._device, self._static = device, device.graphs.policy.static_shapes
        self._size = page_size or (model.page_sizes()[0] if any(model.facts.caches) else 16)
        self._per_sequence = -(-max_length // self._size)
        self.lengths = [0] * count
        self.pools = _bind(model, device, self._size, 1 + count * self._per_sequence)

    @torch.no_grad()
    def step(
        self, segments: Sequence[tuple[int, Sequence[int]]], taps: tuple[int, ...] = (), states: torch.Tensor | None = None
    ) -> ModelOutput:
        """Run new tokens of some sequences, given as (sequence, token ids); hidden states of all of them in order.

        `states`: what comes with each token, of models that join both.
        """
        batch = self._batch(segments)
        there = self._device.torch_device
        positions = [p for s, ids in segments for p in range(self.lengths[s], self.lengths[s] + len(ids))]
        groups = tuple(_state_batch(batch) if layout.group.kind is CacheKind.STATE else batch for layout, _ in self.pools)
        inputs = ModelInputs(
            torch.tensor([token for _, ids in segments for token in ids], device=there),
            torch.tensor(positions, device=there),
            groups,
            self.model.plan(groups),
            taps=taps,
            segments=Segments(batch.query_start),
            states=states,
        )
        output = self.model.forward(inputs)
        if self._static:  # a step is a program, whatever is done with what it gave
            self._device.synchronize()
        for s, ids in segments:
            self.lengths[s] += len(ids)
        return output

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits on the host, float32."""
        return self.model.logits(hidden).cpu().float()

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], torch.Tensor]]:
        """Greedy tokens of each prompt, all run together, and the logits that each came from, `[count, vocab]`."""
        texts = [list(prompt) for prompt in prompts]
        feed = [(s, self._behind(s, text)) for s, text in enumerate(texts)]
        rows: list[torch.Tensor] = []
        for _ in range(count):
            ends = torch.tensor([len(ids) for _, ids in feed]).cumsum(0) - 1
            logits = self.logits(self.step(feed).hidden[ends.to(self._device.torch_device)])
            rows.append(logits)
            for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
                text.append(token)
            feed = [(s, self._behind(s, text)) for s, text in enumerate(texts)]
        stacked = torch.stack(rows, dim=1)
        return [(logits.argmax(-1).tolist(), logits) for logits in stacked]

    def _behind(self, sequence: int, text: list[int]) -> list[int]:
        """What to run next: the tokens that are not cached, or all of them where growth has made the cache void."""
        epochs, cached = self.model.facts.length_epochs, self.lengths[sequence]
        if epochs is not None and cached and epochs.of(cached) != epochs.of(len(text)):
            self.lengths[sequence] = cached = 0
        return text[cached:]

    def page_ids(self, sequence: int) -> list[int]:
        """Pages of a sequence, the same in every group."""
        return [1 + sequence * self._per_sequence + page for page in range(self._per_sequence)]

    def _batch(self, segments: Sequence[tuple[int, Sequence[int]]]) -> PagedBatch:
        there = self._device.torch_device
        starts = [0]
        for _, ids in segments:
            starts.append(starts[-1] + len(ids))
        lengths = [self.lengths[s] + len(ids) for s, ids in segments]
        tables = [self.page_ids(s) for s, _ in segments]
        slots = [table[p // self._size] * self._size + p % self._size for (s, ids), table in zip(segments, tables, strict=True)
                 for p in range(self.lengths[s], self.lengths[s] + len(ids))]  # fmt: skip
        return PagedBatch(
            torch.tensor(starts, dtype=torch.int32, device=there),
            torch.tensor(lengths, dtype=torch.int32, device=there),
            torch.tensor(tables, dtype=torch.int32, device=there),
            torch.tensor(slots, dtype=torch.int64, device=there),
            max(len(ids) for _, ids in segments),
            # Where each shape is a program, one bound for all steps: attention looks at so many keys, seen or not.
            self._per_sequence * self._size if self._static else max(lengths),
        )


def _state_batch(batch: PagedBatch) -> PagedBatch:
    """A sequence's state lies in one page, its first, which a step reads and writes."""
    return replace(batch, block_table=batch.block_table[:, :1].repeat(1, 2))


def _bind(model: Model, device: Device, page_size: int, num_pages: int) -> tuple[tuple[KVLayout, torch.Tensor], ...]:
    """One group and one pool for layers that store the same."""
    layers_of: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(model.facts.caches):
        if cache is not None:
            layers_of.setdefault(cache, []).append(layer)
    pages: list[LayerPages | StatePages | None] = [None] * len(model.facts.caches)
    group_of_layer = [0] * len(pages)
    pools: list[tuple[KVLayout, torch.Tensor]] = []
    for index, (cache, layers) in enumerate(layers_of.items()):
        group = CacheGroup(cache.kind, tuple(layers), (cache,) * len(layers), page_size, 0, cache.window)
        layout = device.kv_layout(group)
        pool, views = layout.allocate(num_pages)
        pools.append((layout, pool))
        for layer, view in zip(layers, views, strict=True):
            pages[layer], group_of_layer[layer] = view, index
    model.bind(pages, group_of_layer, [page_size] * len(layers_of))
    return tuple(pools)
