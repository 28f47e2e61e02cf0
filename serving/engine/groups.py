"""Cache groups: which layers share a block table, how large a page is, and which pages a group still needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from pagoda.hal.errors import ModelError
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.serving.engine.plan import IntArray

GROUP_COST = 0.02
"""A further group (a block table to pack, a plan per step) is worth it when it saves this share of the pool."""

RANK_COST = 1e-3
"""The same for a page size that the kernels like less, per step down their list."""

WINDOW_WEIGHT = 0.25
"""Weight of padding in a windowed group's pages: a long sequence keeps few of them."""

PAGED = (CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED, CacheKind.LATENT)

Position = TypeVar("Position", int, IntArray)


class GroupRule(NamedTuple):
    """What the scheduler knows of a group."""

    kind: CacheKind
    tokens_per_page: int
    window: int | None

    @classmethod
    def of(cls, group: CacheGroup) -> GroupRule:
        return cls(group.kind, group.tokens_per_page, group.window)

    def first_visible(self, position: Position) -> Position:
        """First position that the query at `position` sees."""
        if self.window is None:
            return position * 0
        if self.kind is CacheKind.CHUNKED:
            return position // self.window * self.window
        return np.maximum(position - self.window + 1, 0) if isinstance(position, np.ndarray) else max(position - self.window + 1, 0)

    def first_page(self, position: Position) -> Position:
        """Index in the block table of the first page that a query at `position` reads."""
        return self.first_visible(position) // self.tokens_per_page

    def pages(self, tokens: int) -> int:
        """Entries of the block table that `tokens` tokens reach."""
        return -(-tokens // self.tokens_per_page)

    def peak_pages(self, tokens: int, ahead: int) -> int:
        """Most pages that a sequence of `tokens` holds at a time, when at most `ahead` tokens are in flight."""
        if self.window is None:
            return self.pages(tokens)
        return min(self.pages(tokens), self.pages(self.window + ahead) + 1)


def hash_unit(rules: Sequence[GroupRule]) -> int:
    """Tokens per entry of the hash chain: a whole number of pages of every group."""
    return math.lcm(*(rule.tokens_per_page for rule in rules))


@dataclass(frozen=True)
class Grouping:
    """The groups of a model. `padding` is the share of page bytes that hold nothing, over full pages of every group."""

    groups: tuple[CacheGroup, ...]
    padding: float


class _Option(NamedTuple):
    """One way to cut a bucket of equal layers into `parts` groups: what it costs, and bytes held by one page of each of them."""

    cost: float
    parts: int
    rank: int
    held: int
    weight: float


def resolve_groups(caches: Sequence[LayerCache | None], page_sizes: Sequence[int]) -> Grouping:
    """Group layers that store and see the same, and cut the groups so that all share one page size with little padding.

    Args:
        caches: what each layer stores, None for layers that store nothing.
        page_sizes: tokens per page that the kernels allow, preferred first.
    Raises `ModelError` for kinds that pages of tokens cannot hold.
    """
    buckets = _buckets(caches)
    if not buckets or not page_sizes:
        raise ModelError(
            f"{len(buckets)} kinds of layers with a KV cache and page sizes {tuple(page_sizes)}: at least one of each is needed"
        )
    candidates = sorted(
        {_held(cache, layers, parts, size) for cache, layers in buckets.items() for parts in _cuts(layers) for size in page_sizes}
    )
    fits = [(page_bytes, options) for page_bytes in candidates if (options := _fit(buckets, page_sizes, page_bytes))]
    page_bytes, options = min(fits, key=lambda fit: _cost(*fit))
    groups = [
        CacheGroup(cache.kind, part, (cache,) * len(part), page_sizes[option.rank], page_bytes, cache.window)
        for (cache, layers), option in zip(buckets.items(), options, strict=True)
        for part in _split(layers, option.parts)
    ]
    groups.sort(key=lambda group: group.layers)
    return Grouping(tuple(groups), 1 - sum(group.used_bytes for group in groups) / (page_bytes * len(groups)))


def _buckets(caches: Sequence[LayerCache | None]) -> dict[LayerCache, list[int]]:
    buckets: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(caches):
        if cache is None:
            continue
        if cache.kind not in PAGED:
            raise ModelError(f"layer {layer} keeps a cache of kind {cache.kind.value!r}; pages hold {[kind.value for kind in PAGED]}")
        buckets.setdefault(cache, []).append(layer)
    return buckets


def _cuts(layers: Sequence[int]) -> list[int]:
    """Numbers of groups worth trying: one for each number of layers that the largest group may have."""
    largest = {math.ceil(len(layers) / parts) for parts in range(1, len(layers) + 1)}
    return sorted({math.ceil(len(layers) / size) for size in largest})


def _split(layers: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    largest = math.ceil(len(layers) / parts)
    return [tuple(layers[start : start + largest]) for start in range(0, len(layers), largest)]


def _held(cache: LayerCache, layers: Sequence[int], parts: int, size: int) -> int:
    return math.ceil(len(layers) / parts) * cache.bytes_per_token * size


def _fit(buckets: dict[LayerCache, list[int]], page_sizes: Sequence[int], page_bytes: int) -> list[_Option]:
    """The cheapest option of each bucket in pages of this size; empty where one has none."""
    chosen = []
    for cache, layers in buckets.items():
        weight = 1.0 if cache.window is None else WINDOW_WEIGHT
        options = [
            _Option(parts * (weight + GROUP_COST) + RANK_COST * rank - weight * held / page_bytes, parts, rank, held, weight)
            for parts in _cuts(layers)
            for rank, size in enumerate(page_sizes)
            if _held(cache, layers, parts, size) <= page_bytes
            for held in (len(layers) * cache.bytes_per_token * size,)
        ]
        if not options:
            return []
        chosen.append(min(options))
    return chosen


def _cost(page_bytes: int, options: Sequence[_Option]) -> float:
    there = sum(option.weight * option.parts * page_bytes for option in options)
    padding = 1 - sum(option.weight * option.held for option in options) / there
    return padding + sum(GROUP_COST * option.parts + RANK_COST * option.rank for option in options)
