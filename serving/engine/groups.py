"""Cache groups: which layers share a block table, how large a page is, and which pages a group still needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from pagoda.hal.errors import ModelError
from pagoda.hal.kv import CacheGroup, CacheKind, LayerCache
from pagoda.serving.engine.layout import MAX_GROUPS
from pagoda.serving.engine.plan import IntArray

GROUP_COST = 0.02
"""A further group (a block table to pack, a plan per step) is worth it when it saves this share of the pool."""

RANK_COST = 0.015
"""The same for a page size further down the kernels' list, per step: larger pages also make prefix hits coarser."""

WINDOW_WEIGHT = 0.25
"""Weight of padding in a windowed group's pages: a long sequence keeps few of them."""

PAGED = (CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED, CacheKind.LATENT, CacheKind.CROSS)

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


def token_rules(groups: Sequence[CacheGroup]) -> tuple[GroupRule, ...]:
    """The rules of the groups whose pages hold a sequence's own tokens; those of encoders and recurrent layers come after them."""
    return tuple(GroupRule.of(group) for group in groups if group.kind not in (CacheKind.CROSS, CacheKind.STATE))


def cross_groups(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups whose pages hold what an encoder gave, for as long as the request lives."""
    return tuple(group for group in groups if group.kind is CacheKind.CROSS)


def peak_pages(groups: Sequence[CacheGroup], tokens: int, ahead: int) -> int:
    """Most pages that a sequence of `tokens` holds at a time: a state that is kept and the next one count both, and of what an encoder
    gave as many tokens; what a longer input takes beyond is looked at when it comes."""
    states = sum(2 * group.pages_per_state for group in groups)
    crossed = sum(-(-min(group.longest, tokens) // group.tokens_per_page) for group in cross_groups(groups))
    return states + crossed + sum(rule.peak_pages(tokens, ahead) for rule in token_rules(groups))


def hash_unit(rules: Sequence[GroupRule]) -> int:
    """Tokens per entry of the hash chain: a whole number of pages of every group."""
    return math.lcm(*(rule.tokens_per_page for rule in rules))


@dataclass(frozen=True)
class Grouping:
    """The groups of a model. `padding` is the share of page bytes that hold nothing, over full pages of every group."""

    groups: tuple[CacheGroup, ...]
    padding: float


class _Layer(NamedTuple):
    number: int
    cache: LayerCache


class _Option(NamedTuple):
    """One way to cut a bucket of layers into `parts` groups: what it costs, and bytes held by one page of each of them."""

    cost: float
    parts: int
    rank: int
    held: int
    weight: float


def resolve_groups(caches: Sequence[LayerCache | None], page_sizes: Sequence[int], most: int = MAX_GROUPS) -> Grouping:
    """Group layers that store and see the same, and cut the groups so that all share one page size with little padding.

    Where that makes more than `most` groups, layers of different geometry that see the same share one.

    Args:
        caches: what each layer stores, None for layers that store nothing.
        page_sizes: tokens per page that the kernels allow, preferred first.
    Raises `ModelError` for kinds that pages of tokens cannot hold, and for too many kinds.
    """
    stored = [_Layer(number, cache) for number, cache in enumerate(caches) if cache is not None]
    if not stored or not page_sizes:
        raise ModelError(f"{len(stored)} layers with a KV cache and page sizes {tuple(page_sizes)}: at least one of each is needed")
    layers, states = _of_kind(stored, state=False), _of_kind(stored, state=True)
    _check_kinds(layers)
    groups = _token_groups(layers, page_sizes, most - bool(states), max((layer.cache.state_bytes for layer in states), default=0))
    if states:
        groups.append(_state_group(states, groups, page_sizes))
    there = groups[0].page_bytes * sum(group.pages_per_state or 1 for group in groups)
    return Grouping(tuple(groups), 1 - sum(group.used_bytes for group in groups) / there)


def _of_kind(layers: Sequence[_Layer], state: bool) -> list[_Layer]:
    return [layer for layer in layers if (layer.cache.kind is CacheKind.STATE) is state]


def _state_group(states: Sequence[_Layer], groups: Sequence[CacheGroup], page_sizes: Sequence[int]) -> CacheGroup:
    """All recurrent layers, over as many pages of the others' size as they take; alone, in one page."""
    unit = math.lcm(*(group.tokens_per_page for group in groups)) if groups else page_sizes[0]
    caches = tuple(layer.cache for layer in states)
    page_bytes = groups[0].page_bytes if groups else sum(cache.state_bytes for cache in caches)
    return CacheGroup(CacheKind.STATE, _indices(states), caches, unit, page_bytes)


def _token_groups(layers: Sequence[_Layer], page_sizes: Sequence[int], most: int, least: int) -> list[CacheGroup]:
    """`least`: bytes that a page has at any rate."""
    if not layers:
        return []
    apart, together = _buckets(layers, lambda cache: cache), _buckets(layers, lambda cache: (cache.kind, cache.window))
    fits = _fits(apart, page_sizes, most, least) or _fits(together, page_sizes, most, least)
    if not fits:
        raise ModelError(f"the layers need {len(together)} cache groups and a step has room for {most}")
    buckets, page_bytes, options = min(fits, key=lambda fit: _cost(fit[1], fit[2]))
    groups = [
        CacheGroup(kind, _indices(part), tuple(layer.cache for layer in part), page_sizes[option.rank], page_bytes, part[0].cache.window)
        for bucket, option in zip(buckets, options, strict=True)
        for part in _split(bucket, option.parts)
        for kind in (part[0].cache.kind,)
    ]
    return sorted(groups, key=lambda group: (group.kind is CacheKind.CROSS, group.layers))


def _check_kinds(layers: Sequence[_Layer]) -> None:
    for layer in layers:
        if layer.cache.kind not in PAGED:
            kinds = [kind.value for kind in PAGED]
            raise ModelError(f"layer {layer.number} keeps a cache of kind {layer.cache.kind.value!r}; pages hold {kinds}")


def _buckets(layers: Sequence[_Layer], key: Callable[[LayerCache], object]) -> list[list[_Layer]]:
    buckets: dict[object, list[_Layer]] = {}
    for layer in layers:
        buckets.setdefault(key(layer.cache), []).append(layer)
    return list(buckets.values())


def _indices(part: Sequence[_Layer]) -> tuple[int, ...]:
    return tuple(layer.number for layer in part)


def _bytes(part: Sequence[_Layer]) -> int:
    return sum(layer.cache.bytes_per_token for layer in part)


def _cuts(bucket: Sequence[_Layer]) -> list[int]:
    """Numbers of groups worth trying: one for each number of layers that the largest group may have."""
    largest = {math.ceil(len(bucket) / parts) for parts in range(1, len(bucket) + 1)}
    return sorted({math.ceil(len(bucket) / size) for size in largest})


def _split(bucket: Sequence[_Layer], parts: int) -> list[Sequence[_Layer]]:
    largest = math.ceil(len(bucket) / parts)
    return [bucket[start : start + largest] for start in range(0, len(bucket), largest)]


def _page(bucket: Sequence[_Layer], parts: int, size: int) -> int:
    return size * max(_bytes(part) for part in _split(bucket, parts))


def _fits(
    buckets: list[list[_Layer]], page_sizes: Sequence[int], most: int, least: int
) -> list[tuple[list[list[_Layer]], int, list[_Option]]]:
    """For each page size in bytes that some cut fills, the cheapest cut of each bucket; only those of at most `most` groups."""
    if len(buckets) > most:
        return []
    candidates = sorted({max(least, _page(bucket, parts, size)) for bucket in buckets for parts in _cuts(bucket) for size in page_sizes})
    options = [(page_bytes, [_cheapest(bucket, page_sizes, page_bytes) for bucket in buckets]) for page_bytes in candidates]
    whole = [(page_bytes, [one for one in chosen if one is not None]) for page_bytes, chosen in options if None not in chosen]
    return [(buckets, page_bytes, chosen) for page_bytes, chosen in whole if sum(one.parts for one in chosen) <= most]


def _cheapest(bucket: Sequence[_Layer], page_sizes: Sequence[int], page_bytes: int) -> _Option | None:
    weight = 1.0 if bucket[0].cache.window is None else WINDOW_WEIGHT
    options = [
        _Option(parts * (weight + GROUP_COST) + RANK_COST * rank - weight * held / page_bytes, parts, rank, held, weight)
        for parts in _cuts(bucket)
        for rank, size in enumerate(page_sizes)
        if _page(bucket, parts, size) <= page_bytes
        for held in (size * _bytes(bucket),)
    ]
    return min(options, default=None)


def _cost(page_bytes: int, options: Sequence[_Option]) -> float:
    there = sum(option.weight * option.parts * page_bytes for option in options)
    padding = 1 - sum(option.weight * option.held for option in options) / there
    return padding + sum(GROUP_COST * option.parts + RANK_COST * option.rank for option in options)
