"""Kernels that are wrong on purpose, each in its own way: what `pagoda diff` has to name. Never chosen but by name."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.ops.activation import GatedActivationReference
from pagoda.ops.attention import PagedAttentionReference, PagedBatch, WriteKvReference
from pagoda.ops.linear import GemmReference


class RaggedGemm(GemmReference):
    """Forgets the rows after the last whole tile of 8."""

    def run(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        out = super().run(packed, x)
        whole = len(x) // 8 * 8
        return out.index_fill(0, torch.arange(whole, len(x)), 0.0) if whole and whole < len(x) else out


class RoundedGate(GatedActivationReference):
    """Goes through a narrower dtype."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x).bfloat16().to(x.dtype)


class DecodeAttention(PagedAttentionReference):
    """Right for prompts, off by a factor where each request brings one token."""

    def run(self, q: torch.Tensor, k_pages: Any, v_pages: Any, batch: PagedBatch, *rest: Any, **more: Any) -> torch.Tensor:
        out = super().run(q, k_pages, v_pages, batch, *rest, **more)
        return out * 1.05 if batch.max_query == 1 else out


class SwappedPages(WriteKvReference):
    """Writes values where keys belong, for one token of many."""

    def run(self, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor) -> None:
        k = torch.cat([k[:-1], v[-1:]]) if len(k) > 1 else k
        super().run(k, v, k_pages, v_pages, slots)
