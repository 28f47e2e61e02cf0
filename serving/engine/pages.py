"""The KV pool on one rank's device: its tensor, a layout per cache group, and each layer's view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from pagoda.hal.device import Device
from pagoda.hal.kv import CacheGroup, CacheKind, LayerPages, StatePages
from pagoda.models.model import Model


class Pages:
    """`num_pages` pages of `page_bytes`, shared by all groups; page 0 takes what padding rows write.

    Args:
        device: whose memory and layouts.
        groups: cache groups with one `page_bytes`; none for models without a cache.
        num_pages: page 0 included.
        num_layers: layers of the model, those without a cache included.

    `page_sizes`: tokens per page of each group; 0 for recurrent layers, whose pages hold none. `written`: of those that a step of tokens
    writes, 0 for the others. `crossed`: of those that hold an encoder's output the most tokens of it, 0 for the others.
    """

    def __init__(self, device: Device, groups: tuple[CacheGroup, ...], num_pages: int, num_layers: int) -> None:
        self.device = device
        self.groups = groups
        self.num_pages = num_pages
        self.page_sizes = tuple(0 if group.kind is CacheKind.STATE else group.tokens_per_page for group in groups)
        self.crossed = tuple(group.longest for group in groups)
        self.written = tuple(0 if longest else size for longest, size in zip(self.crossed, self.page_sizes, strict=True))
        self._num_layers = num_layers
        self._layouts = tuple(device.kv_layout(group) for group in groups)
        self.pool: torch.Tensor | None = None
        self._views: list[tuple[LayerPages | StatePages, ...]] = []
        for layout in self._layouts:
            self.pool, views = layout.allocate(num_pages, self.pool)
            self._views.append(views)

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else self.pool.nbytes

    def bind(self, model: Model) -> None:
        """Hand each layer its pages."""
        pages: list[LayerPages | StatePages | None] = [None] * self._num_layers
        group_of_layer = [0] * self._num_layers
        for index, (group, views) in enumerate(zip(self.groups, self._views)):
            for layer, view in zip(group.layers, views):
                pages[layer], group_of_layer[layer] = view, index
        model.bind(pages, group_of_layer, self.page_sizes)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages `source[i] → target[i]`, int64 ids on the device."""
        assert self.pool is not None
        self._layouts[0].copy(self.pool, source, target)

    def table_widths(self, longest: int) -> tuple[int, ...]:
        """Columns of each group's block table for a sequence of `longest` tokens."""
        return tuple(group.table_width(longest) for group in self.groups)

    @contextmanager
    def states_apart(self, tables: Sequence[torch.Tensor]) -> Iterator[None]:
        """While this is open, a step with these block tables writes its recurrent states into page 0 alone, which is then as it was: there
        need be room for one page more, however many requests there are."""
        if self.pool is None or not self.groups or self.groups[-1].kind is not CacheKind.STATE:
            yield
            return
        written = tables[-1][:, tables[-1].shape[1] // 2 :]
        pages, held = written.clone(), self.pool[0].clone()
        written.zero_()
        try:
            yield
        finally:
            written.copy_(pages)
            self.pool[0] = held

    def clear(self) -> None:
        """Zero what padding rows and a warm-up read."""
        if self.pool is not None:
            self.pool[:2].zero_()
