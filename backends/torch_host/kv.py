"""KV pages on strided memory: each layer's K, then its V, head-major inside the page, every part aligned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagoda.hal.errors import ConfigError
from pagoda.hal.kv import (
    STATE_ALIGNMENT,
    CacheGroup,
    CacheKind,
    LayerCache,
    LayerPages,
    NeutralForm,
    NeutralPages,
    StatePages,
    place_states,
)
from pagoda.hal.memory import Memory, MemoryKind


@dataclass(frozen=True)
class _Part:
    """K or V of one layer inside a page: `heads` runs of `tokens · dim` numbers from byte `offset` on."""

    offset: int
    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.heads * self.tokens * self.dim * self.dtype.itemsize

    def view(self, pool: torch.Tensor) -> torch.Tensor:
        """`[num_pages, tokens, heads, dim]` over the pool."""
        if self.nbytes == 0:
            return pool.new_empty((pool.shape[0], self.tokens, self.heads, self.dim), dtype=self.dtype)
        flat = pool[:, self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.view(pool.shape[0], self.heads, self.tokens, self.dim).transpose(1, 2)


class HostKVLayout:
    """Pages of one group.

    Args:
        group: its layers; `page_bytes` 0 asks for the smallest page that holds them.
        memory: where a pool is made.
        alignment: bytes that parts and pages start at multiples of.
    """

    def __init__(self, group: CacheGroup, memory: Memory, alignment: int = 64) -> None:
        self.group = group
        self._memory = memory
        self._parts, needed = _place(group, alignment)
        self.page_bytes = group.page_bytes or needed
        if self.page_bytes < needed or self.page_bytes % alignment:
            raise ConfigError(
                f"page_bytes={group.page_bytes} does not suit a page of {group.tokens_per_page} tokens of {len(group.caches)} layers:"
                f" it needs at least {needed} bytes and a multiple of {alignment}"
            )
        first = self._parts[0][0]
        self.page_shape: tuple[int, ...] = (first.heads, first.tokens, first.dim)

    def allocate(self, num_pages: int, pool: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[LayerPages, ...]]:
        pool = _pool(self._memory, num_pages, self.page_bytes, pool)
        return pool, tuple(LayerPages(k.view(pool), v.view(pool)) for k, v in self._parts)

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        pool[target] = pool[source]

    def export(self, pool: torch.Tensor, pages: torch.Tensor) -> NeutralPages:
        form = self._form()
        rows = pool[pages]
        k = torch.stack([part.view(rows) for part, _ in self._parts], dim=1)
        v = torch.stack([part.view(rows) for _, part in self._parts], dim=1)
        return NeutralPages(form, k.contiguous().cpu(), v.contiguous().cpu())

    def load(self, pool: torch.Tensor, pages: torch.Tensor, form: NeutralPages) -> None:
        self._check(form, len(pages))
        rows = pool[pages]
        for layer, (k_part, v_part) in enumerate(self._parts):
            k_part.view(rows).copy_(form.k[:, layer])
            v_part.view(rows).copy_(form.v[:, layer])
        pool[pages] = rows

    def _form(self) -> NeutralForm:
        cache, tokens = self.group.caches[0], self.group.tokens_per_page
        uniform = {(c.heads, c.k_dim, c.v_dim, c.dtype) for c in self.group.caches}
        if len(uniform) != 1:
            raise ConfigError(
                f"pages of layers {self.group.layers} have no neutral form: it needs layers of one geometry, found {sorted(uniform)}"
            )
        return NeutralForm(cache.dtype, cache.heads, cache.k_dim, cache.v_dim, tokens, len(self.group.layers))

    def _check(self, pages: NeutralPages, count: int) -> None:
        own, other = self._form(), pages.form
        wanted = (own.dtype, own.heads, own.k_dim, own.v_dim, own.tokens_per_page, own.num_layers, own.version)
        found = (other.dtype, other.heads, other.k_dim, other.v_dim, other.tokens_per_page, other.num_layers, other.version)
        if wanted != found:
            raise ConfigError(f"pages of {other} do not fit a group of {own}; export them with the same geometry, dtype and page size")
        if pages.k.shape[0] != count or pages.v.shape[0] != count:
            raise ConfigError(f"{pages.k.shape[0]} exported pages were given for {count} page ids")


class HostStateLayout:
    """Pages of a group of recurrent layers; the neutral form does not know them.

    Args:
        group, memory, alignment: as for `HostKVLayout`; with `page_bytes` 0 one page holds a whole state.
    """

    def __init__(self, group: CacheGroup, memory: Memory, alignment: int = 64) -> None:
        self.group = group
        self._memory = memory
        self.page_bytes = group.page_bytes or -(-group.used_bytes // alignment) * alignment
        self._places = place_states(group)
        self.page_shape: tuple[int, ...] = group.caches[0].state[0].shape

    def allocate(self, num_pages: int, pool: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[StatePages, ...]]:
        pool = _pool(self._memory, num_pages, self.page_bytes, pool)
        return pool, tuple(self._view(pool, cache, *place) for cache, place in zip(self.group.caches, self._places, strict=True))

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        pool[target] = pool[source]

    def export(self, pool: torch.Tensor, pages: torch.Tensor) -> NeutralPages:
        raise ConfigError(f"pages of layers {self.group.layers} hold recurrent states, which have no neutral form; compute them again")

    def load(self, pool: torch.Tensor, pages: torch.Tensor, form: NeutralPages) -> None:
        raise ConfigError(f"pages of layers {self.group.layers} hold recurrent states, which have no neutral form; compute them again")

    def _view(self, pool: torch.Tensor, cache: LayerCache, page: int, offset: int) -> StatePages:
        views = []
        for part in cache.state:
            flat = pool[:, offset : offset + part.nbytes].view(getattr(torch, part.dtype))
            views.append(flat.view(pool.shape[0], *part.shape))
            offset += -(-part.nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
        return StatePages(tuple(views), page)


def host_layout(group: CacheGroup, memory: Memory, alignment: int = 64) -> HostKVLayout | HostStateLayout:
    """The layout of a group of either kind."""
    return (HostStateLayout if group.kind is CacheKind.STATE else HostKVLayout)(group, memory, alignment)


def _pool(memory: Memory, num_pages: int, page_bytes: int, pool: torch.Tensor | None) -> torch.Tensor:
    if pool is None:
        pool = memory.alloc(MemoryKind.KV, (num_pages, page_bytes), torch.uint8)
        pool[:1].zero_()
    if tuple(pool.shape) != (num_pages, page_bytes) or pool.dtype != torch.uint8:
        raise ConfigError(f"the pool is {pool.dtype} {tuple(pool.shape)}; the layout needs uint8 {(num_pages, page_bytes)}")
    return pool


def _place(group: CacheGroup, alignment: int) -> tuple[list[tuple[_Part, _Part]], int]:
    parts, offset = [], 0
    for cache in group.caches:
        pair = []
        for heads, tokens, dim, dtype in _runs(cache, group.tokens_per_page):
            part = _Part(offset, heads, tokens, dim, dtype)
            pair.append(part)
            offset += -(-part.nbytes // alignment) * alignment
        parts.append((pair[0], pair[1]))
    return parts, offset


def _runs(cache: LayerCache, tokens: int) -> tuple[tuple[int, int, int, torch.dtype], tuple[int, int, int, torch.dtype]]:
    """(heads, tokens, dim, dtype) of K and V of one layer."""
    dtype: torch.dtype = getattr(torch, cache.dtype)
    return (cache.heads, tokens, cache.k_dim, dtype), (cache.heads, tokens, cache.v_dim, dtype)
