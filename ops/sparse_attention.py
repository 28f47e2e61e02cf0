"""Attention over keys that small heads choose (arXiv:2512.02556): `choose_keys`, and `sparse_attention` of latents over what was chosen.

The small heads share one key a token, which lies in pages beside the latent. Constant factors of their scores change no choice, so there
are none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import PagedBatch, from_pages, softmax, token_owners

_NUMBERS = 1 << 24
"""Numbers of keys that the references gather at a time."""


@dataclass(frozen=True)
class ChooseFacts:
    """Static facts of one layer's choice.

    Attributes:
        dtype: of q and weights; `kv_dtype` of the pages. heads, dim: of the small heads.
        page_size: tokens per page. top_k: most keys of a query.
    """

    dtype: str
    kv_dtype: str
    heads: int
    dim: int
    page_size: int
    top_k: int


@dataclass(frozen=True)
class SparseAttentionFacts:
    """Static facts of one layer: `num_heads` of this rank over keys of `head_dim` numbers, whose first `v_dim` are the values.

    Attributes:
        dtype: of q and of the output; `kv_dtype` of the pages. scale: multiplies q·k.
        page_size: tokens per page. top_k: most keys of a query.
    """

    dtype: str
    kv_dtype: str
    num_heads: int
    head_dim: int
    v_dim: int
    page_size: int
    scale: float
    top_k: int


class ChooseKeysReference(PlainKernel):
    """`run(q, weights, pages, batch)`: q `[T, H, D]`, weights `[T, H]`, pages `[num_pages, page_size, 1, D]` → `[T, top_k]` int32.

    A token's row holds the positions, in its request, of the keys that it is to see: of those up to its own the `top_k` with the largest
    Σ weight · max(q · k, 0) over the heads, in float32; of equal ones the earliest. They ascend, and −1 stands past the last one. Rows of
    padding tokens hold any such numbers.
    """

    facts: ChooseFacts

    def run(self, q: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        owners = token_owners(batch, q.shape[0])
        step = max(1, _NUMBERS // (max(batch.max_seq, 1) * self.facts.dim))
        parts = [
            self._choose(q[i : i + step], weights[i : i + step], pages, batch, *(owner[i : i + step] for owner in owners))
            for i in range(0, q.shape[0], step)
        ]
        return torch.cat(parts) if parts else torch.empty(0, self.facts.top_k, dtype=torch.int32, device=q.device)

    def _choose(
        self, q: torch.Tensor, weights: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, request: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        length, most = max(batch.max_seq, 1), self.facts.top_k
        keys = from_pages(pages[batch.block_table[request].long()].flatten(1, 2)[:, :length, 0], wide)
        products = torch.relu(torch.einsum("thd,tkd->thk", q.to(wide), keys))
        at = torch.arange(keys.shape[1], device=q.device)
        unseen = at > position[:, None]
        scores = torch.einsum("th,thk->tk", weights.to(wide), products).masked_fill(unseen, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :most]
        end = keys.shape[1]
        found = best.masked_fill(unseen.gather(1, best), end).sort(dim=-1).values
        found = torch.nn.functional.pad(found, (0, most - found.shape[1]), value=end)
        return found.masked_fill(found == end, -1).to(torch.int32)


class SparseAttentionReference(PlainKernel):
    """`run(q, pages, chosen, batch)`: q `[T, H, D]`, pages `[num_pages, page_size, 1, D]`, chosen `[T, K]` int32 → `[T, H, Dv]`.

    `chosen`: positions of keys as `choose_keys` gives them, whatever their number; a row without any gives zeros. Softmax is float32.
    Padding tokens give unspecified finite numbers.
    """

    facts: SparseAttentionFacts

    def run(self, q: torch.Tensor, pages: torch.Tensor, chosen: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        request, _ = token_owners(batch, q.shape[0])
        step = max(1, _NUMBERS // (max(chosen.shape[1], 1) * self.facts.head_dim))
        parts = [
            self._attend(q[i : i + step], pages, chosen[i : i + step].long(), batch.block_table[request[i : i + step]].long())
            for i in range(0, q.shape[0], step)
        ]
        return torch.cat(parts) if parts else q.new_empty(0, self.facts.num_heads, self.facts.v_dim)

    def _attend(self, q: torch.Tensor, pages: torch.Tensor, chosen: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        wide, size = torch.float64 if q.dtype == torch.float64 else torch.float32, self.facts.page_size
        there = chosen >= 0
        at = chosen.clamp(min=0)
        keys = from_pages(pages[table.gather(1, at // size), at % size, 0], wide)
        keys = keys.masked_fill(~there[:, :, None], 0.0)
        logits = torch.einsum("thd,tkd->thk", q.to(wide), keys) * self.facts.scale
        weights = softmax(logits.masked_fill(~there[:, None], float("-inf")), None)
        return torch.einsum("thk,tkd->thd", weights, keys[..., : self.facts.v_dim]).to(q.dtype)
