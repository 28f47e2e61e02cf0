"""Attention over paged KV: `write_kv` and `paged_attention`, for a ragged batch of query segments (arXiv:2309.06180).

Pages are logical `[num_pages, tokens_per_page, kv_heads, dim]` views with any strides: the device's `KVLayout` decides how
they lie, kernels read strides. In int8 pages a head of a token has a scale of its own, whose four bytes follow the numbers (`to_pages`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pagoda.hal.kernel import PlainKernel
from pagoda.hal.kv import SCALE_BYTES


@dataclass(frozen=True)
class AttentionFacts:
    """Static facts of one attention layer.

    Attributes:
        dtype: of q and of the output; `kv_dtype` of the pages.
        num_heads, num_kv_heads, head_dim, v_dim: geometry on this rank; heads are grouped (arXiv:2305.13245).
        page_size: tokens per page.
        scale: multiplies q·k.
        window: query i sees keys j with i − window < j ≤ i; None means all.
        chunk: query i sees keys of its own chunk i // chunk only; None means all.
        softcap: logits become softcap · tanh(logits / softcap).
        sinks: a learned logit per head joins the softmax without a value.
        alibi: a slope per head times (j − i) is added to the logits.
        causal: query i sees keys j ≤ i; False: all keys of its request, whatever its own position, which may be beyond them.
        bias: a number per head and distance i − j is added to the logits.
        coarse: the model's weights have few bits, so kernels may compute with fewer than the dtype's.
        latent: values are the first `v_dim` numbers of the keys of the one KV head, and `v_pages` a view of `k_pages`: a kernel may read
            both at once (arXiv:2405.04434). Whoever writes such pages writes keys alone.
    """

    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_dim: int
    page_size: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    causal: bool = True
    bias: bool = False
    coarse: bool = False
    latent: bool = False


def written(facts: AttentionFacts) -> AttentionFacts:
    """Facts of the `write_kv` that fills the pages which attention of these facts reads."""
    return replace(facts, v_dim=0, latent=False) if facts.latent else facts


class HostLengths(NamedTuple):
    """What the host knows exactly of a step: `query_start` `[R + 1]` and `seq_lens` `[R]`, int32."""

    query_start: NDArray[np.int32]
    seq_lens: NDArray[np.int32]

    @property
    def prompts(self) -> int:
        """Rows up to the last one with several query tokens; what follows are decodes."""
        several = np.flatnonzero(np.diff(self.query_start) > 1)
        return int(several[-1]) + 1 if len(several) else 0


@dataclass(frozen=True)
class TreeMask:
    """Drafts that branch: the last tokens of a request that has them.

    Attributes:
        nodes: `[R]` int32, how many of the request's last tokens are drafts.
        seen: `[T]` int64, of a draft: bit j is set where it sees draft j of its request, itself included; −1 for other tokens. A draft sees
            all keys before the drafts, as windows and slopes have it at its own depth.
    """

    nodes: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True)
class PagedBatch:
    """One cache group's view of a step. Request r has query tokens `[query_start[r], query_start[r+1])`, its last `q` ones.

    Attributes:
        query_start: `[R + 1]` int32.
        seq_lens: `[R]` int32, keys of the request including this step's.
        block_table: `[R, P]` int32 page ids, P ≥ 1; entries past the end, and pages that fell out of a window, are 0.
        slots: `[T]` int64, page · page_size + offset where each token's K and V go; padding tokens go to page 0.
        max_query, max_seq: upper bounds on the host, exact or above.
        lengths: exact lengths, where the host has them when the step is planned.
        tree: of drafts that branch; only kernels that say so take it (the reference does), and no other is given one.
        replayed: the plan serves later steps of the same shapes and bounds too; what it takes from `lengths` is planned again for each.
        shared: `[R + 1]` int32 or None. A row, then for each row how many of its first keys lie in the same pages as that row's: the same
            number for all that share, a multiple of 256, and 0 for the others. A kernel may read them once for all.

    Of a group of recurrent layers, `block_table` holds each request's pages before the step, then those after it, and `slots` is unused.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    max_query: int
    max_seq: int
    lengths: HostLengths | None = None
    tree: TreeMask | None = None
    replayed: bool = False
    shared: torch.Tensor | None = None

    def rows(self, first: int, stop: int | None = None) -> PagedBatch:
        """Some requests of a batch with `lengths`, as a batch of their own: its query tokens count from their first one."""
        assert self.lengths is not None
        stop = len(self.lengths.seq_lens) if stop is None else stop
        starts, lengths = self.lengths.query_start[first : stop + 1], self.lengths.seq_lens[first:stop]
        return PagedBatch(
            self.query_start[first : stop + 1] - (self.query_start[first] if first else 0),
            self.seq_lens[first:stop],
            self.block_table[first:stop],
            self.slots[int(starts[0]) : int(starts[-1])],
            int(np.diff(starts).max(initial=0)),
            int(lengths.max(initial=0)),
            HostLengths(starts - starts[0], lengths),
        )


@dataclass(frozen=True)
class Spans:
    """Query tokens that see more than facts say: those of an image, each other in both directions. E = number of them.

    Attributes:
        rows: `[E]` int64, tokens of the step.
        first, end: `[E]` int64, positions in the request: keys [first, end) are seen too, but those that a window leaves behind. All of
            them are in their pages, `seq_lens` reaches to `end`, and so do the rows, one after another.
    """

    rows: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor


def to_pages(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Heads `[..., D]` as they are stored. In int8 `[..., D + 4]`: x · (127 / max |x|), rounded to the nearest (even at a tie), then the
    scale max |x| / 127, all in float32. In float8 what is too large becomes the largest number."""
    if dtype != torch.int8:
        largest = torch.finfo(dtype).max
        return (x.clamp(-largest, largest) if dtype.itemsize == 1 else x).to(dtype)
    wide = x.float()
    top = wide.abs().amax(-1, keepdim=True)
    # Tensors alone: between a tensor and a number devices multiply by an inverse, which is rounded twice.
    most = torch.full_like(top, 127)
    codes = (wide * torch.where(top > 0, most / top, 0)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([codes, (top / most).contiguous().view(torch.int8)], -1)


def from_pages(stored: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The other way."""
    if stored.dtype != torch.int8:
        return stored.to(wide)
    return stored[..., :-SCALE_BYTES].to(wide) * stored[..., -SCALE_BYTES:].contiguous().view(torch.float32).to(wide)


_QUERIES, _NUMBERS = 32, 1 << 22
"""Query tokens that the reference handles at a time: so many, and more while they gather no more numbers of keys than that."""


class WriteKvReference(PlainKernel):
    """`run(k, v, k_pages, v_pages, slots)`: store k `[T, Hk, D]` and v `[T, Hk, Dv]` in place; slots are distinct, page 0 apart."""

    facts: AttentionFacts

    def run(self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
        page, offset = slots // self.facts.page_size, slots % self.facts.page_size
        k_pages[page, offset] = to_pages(k, k_pages.dtype)
        v_pages[page, offset] = to_pages(v, v_pages.dtype)


class PagedAttentionReference(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan, sinks=None, slopes=None, bias=None)`: q `[T, H, D]` → `[T, H, Dv]`.

    sinks, slopes: `[H]`. bias: `[H, N]` float32, the number for distance d = i − j at min(d, N − 1); only of causal layers without a soft
    cap, and given to kernels whose facts say so alone. Padding tokens (past `query_start[R]`) give unspecified finite numbers. Softmax is
    float32; the soft cap comes before the slopes. What lies in a page past a request's length, in page 0 or out of a window never matters,
    NaN included. In page 0, and past the length in the last page of a request with several query tokens, v_pages may become zeros.
    """

    facts: AttentionFacts

    def run(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        plan: Any = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        owners = (*token_owners(batch, q.shape[0]), torch.arange(q.shape[0], device=q.device))
        # Each query gathers its own keys, so a few queries at a time bound the memory; their number depends on shapes alone.
        each = batch.block_table.shape[1] * self.facts.page_size * self.facts.num_kv_heads * self.facts.head_dim
        step = max(_QUERIES, _NUMBERS // max(each, 1))
        parts = [
            self._attend(q[i : i + step], k_pages, v_pages, batch, [o[i : i + step] for o in owners], sinks, slopes, bias)
            for i in range(0, q.shape[0], step)
        ]
        return torch.cat(parts) if parts else q.new_empty(0, self.facts.num_heads, self.facts.v_dim)

    def _attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, owners: list[torch.Tensor],
        sinks: torch.Tensor | None, slopes: torch.Tensor | None, bias: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        request, position, token = owners
        pages = batch.block_table[request].long()
        keys = from_pages(k_pages[pages].flatten(1, 2)[:, : max(batch.max_seq, 1)], wide)
        values = from_pages(v_pages[pages].flatten(1, 2)[:, : max(batch.max_seq, 1)], wide)
        group = self.facts.num_heads // self.facts.num_kv_heads
        q_TGHD = q.to(wide).unflatten(1, (self.facts.num_kv_heads, group))
        logits = torch.einsum("tghd,tkgd->tghk", q_TGHD, keys) * self.facts.scale
        if self.facts.softcap is not None:
            logits = self.facts.softcap * torch.tanh(logits / self.facts.softcap)
        key_position = torch.arange(keys.shape[1], device=q.device).expand(len(q), -1)
        sees = None
        if batch.tree is not None:
            position, key_position, sees = _in_tree(batch, batch.tree, request, position, token, key_position)
        distance = position[:, None] - key_position
        if slopes is not None:
            logits = logits - slopes.to(wide).view(1, -1, group, 1) * distance[:, None, None, :]
        if bias is not None:
            far = bias[:, distance.clamp(0, bias.shape[1] - 1)]  # [H, t, K]
            logits = logits + far.to(wide).transpose(0, 1).unflatten(1, (-1, group))
        visible = self._visible(distance, position, key_position)
        visible = visible & (torch.arange(keys.shape[1], device=q.device) < batch.seq_lens[request, None])
        if sees is not None:
            visible = visible & sees
        logits = logits.masked_fill(~visible[:, None, None, :], float("-inf"))
        weights = softmax(logits, sinks.to(wide).view(1, -1, group, 1) if sinks is not None else None)
        # What may not be seen may be anything, NaN too, and 0 · NaN is NaN.
        values = values.masked_fill(~visible[:, :, None, None], 0.0)
        return torch.einsum("tghk,tkgd->tghd", weights, values).flatten(1, 2).to(q.dtype)

    def _visible(self, distance: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.facts.causal:
            visible = visible & (distance >= 0)
        if self.facts.window is not None:
            visible = visible & (distance < self.facts.window)
        if self.facts.chunk is not None:
            visible = visible & (position[:, None] // self.facts.chunk == key // self.facts.chunk)
        return visible


def _in_tree(
    batch: PagedBatch, tree: TreeMask, request: torch.Tensor, position: torch.Tensor, token: torch.Tensor, key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of queries and of their keys `[t, K]` the positions by depth, and which keys a tree lets each query see."""
    bits = torch.arange(63, device=key.device)
    depth = (tree.seen[:, None] >> bits & 1).sum(-1) - 1
    first = (batch.seq_lens - tree.nodes)[request][:, None]
    node = key - first
    inside = (node >= 0) & (node < tree.nodes[request][:, None])
    owner = (batch.query_start[request + 1] - tree.nodes[request])[:, None] + node
    key_depth = depth[owner.clamp(0, len(depth) - 1)]
    seen = tree.seen[token]
    draft = seen >= 0
    sees = ~inside | (draft[:, None] & ((seen[:, None] >> node.clamp(0, 62) & 1) == 1))
    return torch.where(draft, first[:, 0] + depth[token], position), torch.where(inside, first + key_depth, key), sees


def token_owners(batch: PagedBatch, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each token and its position there; padding tokens count as the last request's last token."""
    token = torch.arange(tokens, device=batch.seq_lens.device)
    if batch.seq_lens.shape[0] == 0:
        return token, token
    request = torch.searchsorted(batch.query_start[1:].contiguous(), token.to(torch.int32), right=True)
    request = request.clamp(max=batch.seq_lens.shape[0] - 1)
    behind = batch.query_start[request + 1] - token
    position = (batch.seq_lens[request] - behind).clamp(min=0)
    return request, torch.minimum(position, batch.seq_lens[request] - 1).clamp(min=0)


def span_batch(batch: PagedBatch, spans: Spans, tokens: int) -> PagedBatch:
    """The tokens in spans, of a step of so many, as requests of their own, a span each, whose keys end where it ends: attention that is not
    causal gives what they see. As many requests as tokens, so that no count is looked at; those too many have no tokens."""
    request = token_owners(batch, tokens)[0][spans.rows]
    number = F.pad((request.diff() != 0) | (spans.first.diff() != 0), (1, 0)).cumsum(0)
    starts = torch.searchsorted(number, torch.arange(len(request) + 1, device=number.device))
    first = starts[:-1].clamp(max=len(request) - 1)
    table, lengths = batch.block_table[request[first]], spans.end[first].to(torch.int32)
    return PagedBatch(starts.to(torch.int32), lengths, table, batch.slots[spans.rows], len(request), batch.max_seq)


def softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension; a sink joins the denominator; rows that see nothing give zeros."""
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.clamp(min=torch.finfo(logits.dtype).min)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return weights / total.clamp(min=torch.finfo(logits.dtype).tiny)
