"""Attention of latents over chosen keys in Triton: the kernel of `latent_attention`, whose tiles of keys are gathered by their positions.

Each token has its own keys, so a block is one token with up to 64 of its heads. Decodes split their keys over programs, as there.
"""

from __future__ import annotations

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedBatch
from pagoda.ops.sparse_attention import SparseAttentionFacts
from pagoda.ops.triton.latent_attention import LatentAttention, splits_of
from pagoda.ops.triton.launch import shared_memory
from pagoda.ops.triton.paged_attention import SLOTS, Part, early_of, results
from pagoda.ops.triton.paged_kernels import merge
from pagoda.ops.triton.tiles import latent_tile


class SparseAttention(PlainKernel):
    """`run(q, pages, chosen, batch)`, as in `ops.sparse_attention.SparseAttentionReference`."""

    facts: SparseAttentionFacts

    def __init__(self, facts: SparseAttentionFacts) -> None:
        super().__init__(facts)
        self._latent = LatentAttention(
            AttentionFacts(
                facts.dtype, facts.kv_dtype, facts.num_heads, 1, facts.head_dim, facts.v_dim, facts.page_size, facts.scale, latent=True
            )
        )

    def run(self, q: torch.Tensor, pages: torch.Tensor, chosen: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        tokens, requests = q.shape[0], batch.seq_lens.shape[0]
        single = batch.max_query <= 1
        out = results(q, batch, self._latent.facts, single and tokens == requests)
        if tokens == 0 or requests == 0:
            return out
        q, chosen = q if q.stride(-1) == 1 else q.contiguous(), chosen.contiguous()
        part = self._part(batch, chosen.shape[1], single)
        partial = lse = out
        if part.splits > 1:
            shape = (requests, self.facts.num_heads, part.splits)
            partial = torch.empty(*shape, self.facts.v_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
        self._latent.launch(part, q, pages, out, partial, lse, chosen)
        if part.splits > 1:
            merge[(requests, self.facts.num_heads)](
                partial, lse, out, batch.query_start, out, part.splits, out.stride(0), out.stride(1), HEADS=self.facts.num_heads,
                DV=self.facts.v_dim, BLOCK_DV=self._latent.block_dv, MOST=SLOTS, BLOCK_S=16, SINKS=False, **early_of(part),
            )  # fmt: skip
        return out

    def _part(self, batch: PagedBatch, most: int, single: bool) -> Part:
        device, facts = batch.seq_lens.device, self.facts
        groups, heads = self._latent.groups(device)
        width = self._latent.block_dv + self._latent.block_t
        tile = latent_tile(heads, width * (2 if facts.dtype == "float32" else 1), shared_memory(device))
        splits = splits_of(batch.seq_lens.shape[0] * groups, min(most, batch.max_seq), tile.keys) if single else 1
        return self._latent.part(batch, slice(0, batch.slots.shape[0]), tile, splits, single)
