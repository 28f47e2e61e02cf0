"""KV pages: what a page of a cache group holds, how it lies in memory, and the neutral form that crosses vendors.

All groups of an engine share one pool of equal-sized pages: a uint8 tensor `[num_pages, page_bytes]`. A page of a
group holds `tokens_per_page` tokens of *all* the group's layers, so one page is one contiguous copy when it is swapped or
migrated. Page 0 is never handed out: padding rows write there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagoda.hal.errors import ConfigError

if TYPE_CHECKING:
    import torch


class CacheKind(Enum):
    """What a group's layers need of their pages; decides which pages may be dropped early."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    LATENT = "latent"
    STATE = "state"
    CROSS = "cross"
    ENCODER = "encoder"


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip

SCALE_BYTES = 4
"""Of the float32 that follows the numbers of a head in int8 pages."""

STATE_ALIGNMENT = 64
"""Bytes that each part of a state starts at a multiple of, inside its page."""


def stored_dim(dim: int, dtype: str) -> int:
    """Elements of `dtype` that a page holds for a head of `dim` numbers: in int8, their scale lies behind them."""
    return dim + SCALE_BYTES if dtype == "int8" and dim else dim


@dataclass(frozen=True)
class StatePart:
    """One tensor of a layer's recurrent state, of one request: `shape` numbers of `dtype`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class LayerCache:
    """What one layer stores for one token: K and V of `heads` heads (`v_dim` 0 where V is not stored); `STATE` layers store `state`.

    Attributes:
        kind: see `CacheKind`.
        heads: KV heads of this rank.
        k_dim, v_dim: elements per head (`stored_dim`).
        dtype: name of the stored dtype, such as "bfloat16".
        window: tokens that stay visible (sliding) or that share a chunk (chunked); None means all.
        state: parts of the recurrent state, one of each per request, for `STATE` layers.
        longest: most tokens that an encoder gives one request, for `CROSS` layers.
    """

    kind: CacheKind
    heads: int
    k_dim: int
    v_dim: int
    dtype: str
    window: int | None = None
    state: tuple[StatePart, ...] = ()
    longest: int = 0

    @classmethod
    def of_state(cls, *parts: StatePart) -> LayerCache:
        """The cache of a recurrent layer."""
        return cls(CacheKind.STATE, 0, 0, 0, parts[0].dtype, state=parts)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state, parts aligned."""
        return sum(-(-part.nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT for part in self.state)

    @property
    def bytes_per_token(self) -> int:
        return self.heads * (self.k_dim + self.v_dim) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a block table.

    Attributes:
        kind, window: the same for all its layers.
        layers: indices of the model's layers, ascending.
        caches: what each of them stores, in the same order.
        tokens_per_page: tokens of each layer in one page; of a `STATE` group, the tokens after which a state may be kept for others.
        page_bytes: bytes of a page, padding included; the same for all groups of a pool.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    caches: tuple[LayerCache, ...]
    tokens_per_page: int
    page_bytes: int
    window: int | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of a full page that hold something; of all pages of one state."""
        if self.kind is CacheKind.STATE:
            return sum(cache.state_bytes for cache in self.caches)
        return self.tokens_per_page * sum(cache.bytes_per_token for cache in self.caches)

    @property
    def pages_per_state(self) -> int:
        """Pages that one request's state takes; 0 for groups of tokens."""
        return place_states(self)[-1][0] + 1 if self.kind is CacheKind.STATE else 0

    @property
    def longest(self) -> int:
        """Most tokens that a request keeps in it whatever its own length; 0 where its length says how many."""
        return max(cache.longest for cache in self.caches)

    def table_width(self, tokens: int) -> int:
        """Columns of the block table of a request of `tokens` tokens; a state's pages are listed twice, before and after the step."""
        if self.kind is CacheKind.STATE:
            return 2 * self.pages_per_state
        return -(-(self.longest or tokens) // self.tokens_per_page)


def place_states(group: CacheGroup) -> tuple[tuple[int, int], ...]:
    """Where each layer's state begins: (page of the state, byte offset in it). A layer's state lies within one page.

    With `page_bytes` 0, one page holds all. Raises `ConfigError` where a state is larger than a page.
    """
    page, offset, places = 0, 0, []
    for layer, cache in zip(group.layers, group.caches, strict=True):
        if group.page_bytes and cache.state_bytes > group.page_bytes:
            raise ConfigError(
                f"the state of layer {layer} takes {cache.state_bytes} bytes and a page {group.page_bytes}: it needs larger pages"
            )
        if group.page_bytes and offset + cache.state_bytes > group.page_bytes:
            page, offset = page + 1, 0
        places.append((page, offset))
        offset += cache.state_bytes
    return tuple(places)


class StatePages(NamedTuple):
    """One recurrent layer's state as views into the pool, `[num_pages, *shape]` each; it lies in page `page` of a request's state."""

    parts: tuple[torch.Tensor, ...]
    page: int


class LayerPages(NamedTuple):
    """One layer's pages as views into the pool: logical shape `[num_pages, tokens_per_page, heads, dim]`, any strides."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class NeutralForm:
    """Header of exported pages; the payload is `[pages, layers, 2, tokens, heads, dim]`, contiguous, on the host.

    Attributes:
        shard: (rank, world) of the heads held.
        rope_applied: whether K was rotated before it was stored.
    """

    dtype: str
    heads: int
    k_dim: int
    v_dim: int
    tokens_per_page: int
    num_layers: int
    shard: tuple[int, int] = (0, 1)
    rope_applied: bool = True
    version: int = 1


class NeutralPages(NamedTuple):
    """Pages in the form that any backend can load. `k`, `v`: `[pages, layers, tokens, heads, dim]`, contiguous, host."""

    form: NeutralForm
    k: torch.Tensor
    v: torch.Tensor


class KVLayout(Protocol):
    """How pages of one group lie on a device.

    Attributes:
        page_shape: this vendor's shape of one layer's K in one page (element order as stored).
        page_bytes: bytes of a page.
    """

    group: CacheGroup
    page_shape: tuple[int, ...]
    page_bytes: int

    def allocate(self, num_pages: int, pool: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[LayerPages | StatePages, ...]]:
        """The pool (made here unless given: `[num_pages, page_bytes]` uint8, page 0 zeroed) and a view per layer of the group."""
        ...

    def copy(self, pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages `source[i] → target[i]` (int64 ids on the device); ids in `target` are distinct and not in `source`."""
        ...

    def export(self, pool: torch.Tensor, pages: torch.Tensor) -> NeutralPages:
        """Pages (int64 ids) in the neutral form, on the host."""
        ...

    def load(self, pool: torch.Tensor, pages: torch.Tensor, form: NeutralPages) -> None:
        """Overwrite pages (int64 ids) from the neutral form. Raises `ConfigError` where the header does not fit the group."""
        ...
