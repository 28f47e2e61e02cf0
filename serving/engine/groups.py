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
    """One way to cut a bucket of equal layers: `parts` groups of at most `largest` layers."""

    cost: float
    parts: int
    tokens_per_page: int
    used: int


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
    sizes = sorted(
        {largest * cache.bytes_per_token * size for cache, layers in buckets.items() for largest in _cuts(layers) for size in page_sizes}
    )
    plans = [plan for page_bytes in sizes if (plan := _fit(buckets, page_sizes, page_bytes)) is not None]
    cost, page_bytes, options = min(plans)
    groups = tuple(
        CacheGroup(cache.kind, part, (cache,) * len(part), option.tokens_per_page, page_bytes, cache.window)
        for (cache, layers), option in zip(buckets.items(), options, strict=True)
        for part in _split(layers, option.parts)
    )
    groups = tuple(sorted(groups, key=lambda group: group.layers))
    return Grouping(groups, 1 - sum(group.used_bytes for group in groups) / (page_bytes * len(groups)))


def _buckets(caches: Sequence[LayerCache | None]) -> dict[LayerCache, list[int]]:
    buckets: dict[LayerCache, list[int]] = {}
    for layer, cache in enumerate(caches):
        if cache is None:
            continue
        if cache.kind not in PAGED:
            raise ModelError(f"layer {layer} keeps a cache of kind {cache.kind.value!r}; pages hold {[kind.value for kind in PAGED]}")
        buckets.setdefault(cache, []).append(layer)
    return buckets


def _cuts(layers: Sequence[int]) -> set[int]:
    return {-(-len(layers) // parts) for parts in range(1, len(layers) + 1)}


def _split(layers: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    largest = -(-len(layers) // parts)
    return [tuple(layers[start : start + largest]) for start in range(0, len(layers), largest)]


def _fit(buckets: dict[LayerCache, list[int]], page_sizes: Sequence[int], page_bytes: int) -> tuple[float, int, tuple[_Option, ...]] | None:
    options = []
    for cache, layers in buckets.items():
        choices = [
            _Option(parts * page_bytes - used + GROUP_COST * page_bytes * parts + rank * 1e-3 * page_bytes, parts, size, used)
            for parts in {-(-len(layers) // largest) for largest in _cuts(layers)}
            for rank, size in enumerate(page_sizes)
            if -(-len(layers) // parts) * cache.bytes_per_token * size <= page_bytes
            for used in (len(layers) * cache.bytes_per_token * size,)
        ]
        if not choices:
            return None
        options.append(min(choices))
    held = sum(option.used for option in options)
    pages = sum(option.parts for option in options)
    ranks = sum(page_sizes.index(option.tokens_per_page) for option in options)
    cost = 1 - held / (pages * page_bytes) + GROUP_COST * pages + 1e-3 * ranks
    return cost, page_bytes, tuple(options)
