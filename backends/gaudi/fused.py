"""Fused operators of Intel's bridge for Gaudi behind the contract; imports the bridge when a kernel first runs.

The bridge is in no package registry: names, arguments and meaning are those that its users publish (`tests/samples/gaudi_operators.json`
says where). Shapes come from the host's bounds alone and nothing is copied back, so that steps can be recorded.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, PagedAttentionReference, PagedBatch, token_owners
from pagoda.ops.moe import MoeMlpFacts
from pagoda.ops.norm import NormFacts

SPARE = 4
"""A step whose requests, each padded to the longest, have more than so many times its tokens goes to the reference."""


class RmsNorm(PlainKernel):
    """`run(packed, x)`, as in `ops.norm.RmsNormReference`."""

    facts: NormFacts

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        fused = import_module("habana_frameworks.torch.hpex.normalization").FusedRMSNorm
        # It takes three dimensions.
        out: torch.Tensor = fused.apply(x.reshape(1, -1, self.facts.width), packed["weight"], self.facts.eps)
        return out.view(x.shape)


class AddRmsNorm(RmsNorm):
    """`run(packed, x, residual)`, as in `ops.norm.AddRmsNormReference`."""

    def run(self, packed: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        total = x + residual
        return super().run(packed, total), total


class MoeMlp(PlainKernel):
    """`run(packed, x, weights, ids)`, as in `ops.moe.MoeMlpReference`; choices of other ranks' experts add nothing."""

    facts: MoeMlpFacts

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        facts = self.facts
        if not len(x):
            return torch.empty_like(x)
        out: torch.Tensor = torch.ops.hpu.mixture_of_experts(
            hidden_states=x, expert_routing_table=ids, router_weights=weights.to(x.dtype), w12=list(packed["up"].unbind()),
            w3=list(packed["down"].unbind()), permuted_weights=True, activation="silu", experts_min=facts.first,
            experts_max=facts.first + (facts.local or facts.experts) - 1,
        )  # fmt: skip
        return out


class PagedAttention(PlainKernel):
    """`run(q, k_pages, v_pages, batch, plan)`, as in `ops.attention.PagedAttentionReference`: each request's pages gathered, its queries
    padded to the longest, and what a query sees as a mask."""

    facts: AttentionFacts

    def __init__(self, facts: AttentionFacts) -> None:
        super().__init__(facts)
        self._reference = PagedAttentionReference(facts)

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: PagedBatch, plan: Any = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        tokens, requests, longest = q.shape[0], batch.seq_lens.shape[0], max(batch.max_query, 1)
        if not tokens or not requests or batch.tree is not None or requests * longest > SPARE * tokens:
            return self._reference.run(q, k_pages, v_pages, batch)
        starts, steps = batch.query_start[:-1, None], torch.arange(longest, device=q.device)
        pages = batch.block_table.long()
        places = torch.arange(min(max(batch.max_seq, 1), pages.shape[1] * self.facts.page_size), device=q.device)
        inside = places < batch.seq_lens[:, None]
        # What lies behind a request's length may be anything, NaN too, which no mask takes away.
        keys, values = (
            pool[pages].flatten(1, 2)[:, : len(places)].masked_fill(~inside[:, :, None, None], 0.0).transpose(1, 2)
            for pool in (k_pages, v_pages)
        )
        queries = q[(starts + steps).clamp(max=tokens - 1)].transpose(1, 2)
        sees = inside[:, None, :].expand(-1, longest, -1)
        if self.facts.causal:
            positions = (batch.seq_lens - batch.query_start.diff())[:, None] + steps
            sees = sees & (places <= positions[:, :, None])
        mask = torch.zeros(sees.shape, dtype=q.dtype, device=q.device).masked_fill_(~sees, torch.finfo(q.dtype).min)
        fused = import_module("habana_frameworks.torch.hpex.kernels").FusedSDPA
        answers = fused.apply(queries, keys, values, mask[:, None], 0.0, False, self.facts.scale, "fp32", True, None, "right")
        owner = token_owners(batch, tokens)[0]
        within = (torch.arange(tokens, device=q.device) - batch.query_start[owner]).clamp(0, longest - 1)
        out: torch.Tensor = answers.transpose(1, 2)[owner, within]
        return out
