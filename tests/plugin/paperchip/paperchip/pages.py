"""Our own page: token by token, each token's K then V of all layers. The neutral form takes it to anybody else's."""

from __future__ import annotations

import torch
from pagoda.hal.errors import ConfigError
from pagoda.hal.kv import DTYPE_BYTES, CacheGroup, LayerPages, NeutralForm, NeutralPages
from pagoda.hal.memory import Memory, MemoryKind


class PaperLayout:
    """Pages of a group whose layers are alike."""

    def __init__(self, group: CacheGroup, memory: Memory) -> None:
        self.group, self._memory = group, memory
        self._cache = group.caches[0]
        if any(cache != self._cache for cache in group.caches):
            raise ConfigError("paper chips hold layers of one geometry in a group")
        needed = -(-group.used_bytes // 64) * 64
        self.page_bytes = group.page_bytes or needed
        if self.page_bytes < needed or self.page_bytes % 64:
            raise ConfigError(f"page_bytes={group.page_bytes}: a page needs {needed} bytes, in multiples of 64")
        self.page_shape: tuple[int, ...] = (group.tokens_per_page, self._cache.heads, self._cache.k_dim)

    def allocate(self, num_pages: int, pool: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[LayerPages, ...]]:
        if pool is None:
            pool = self._memory.alloc(MemoryKind.KV, (num_pages, self.page_bytes), torch.uint8)
            pool[:1].zero_()
        return pool, tuple(self._views(pool))

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        pool[target] = pool[source]

    def export(self, pool: torch.Tensor, pages: torch.Tensor) -> NeutralPages:
        views = self._views(pool[pages])
        k, v = (torch.stack(tensors, dim=1).contiguous() for tensors in zip(*views, strict=True))
        return NeutralPages(self._form(), k, v)

    def load(self, pool: torch.Tensor, pages: torch.Tensor, form: NeutralPages) -> None:
        if form.form != self._form():
            raise ConfigError(f"pages of {form.form} do not fit {self._form()}")
        rows = pool[pages]
        for layer, view in enumerate(self._views(rows)):
            view.k.copy_(form.k[:, layer])
            view.v.copy_(form.v[:, layer])
        pool[pages] = rows

    def _views(self, pool: torch.Tensor) -> list[LayerPages]:
        cache, tokens, layers = self._cache, self.group.tokens_per_page, len(self.group.caches)
        dtype: torch.dtype = getattr(torch, cache.dtype)
        numbers = self.group.used_bytes // DTYPE_BYTES[cache.dtype]
        rows = pool[:, : self.group.used_bytes].view(dtype).view(-1, tokens, layers, numbers // tokens // layers)
        split = cache.heads * cache.k_dim
        k, v = rows[..., :split].unflatten(-1, (cache.heads, cache.k_dim)), rows[..., split:].unflatten(-1, (cache.heads, cache.v_dim))
        return [LayerPages(k[:, :, layer], v[:, :, layer]) for layer in range(layers)]

    def _form(self) -> NeutralForm:
        cache = self._cache
        return NeutralForm(cache.dtype, cache.heads, cache.k_dim, cache.v_dim, self.group.tokens_per_page, len(self.group.layers))
