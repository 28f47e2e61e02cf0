"""`rope_write`: what lies between the projection to q, k, v and attention, in one primitive: norms of heads, rotation, the cache write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.attention import AttentionFacts, WriteKvReference
from pagoda.ops.norm import NormFacts, RmsNormReference
from pagoda.ops.rope import RopeFacts, RopeReference, RopeStyle


@dataclass(frozen=True)
class RopeWriteFacts:
    """Static facts of one layer.

    Attributes:
        dtype: of q, k and v; `kv_dtype` of the pages.
        num_heads, num_kv_heads, head_dim: geometry on this rank; v's heads are as wide as k's.
        rotary_dim, style: as in `RopeFacts`. page_size: tokens per page.
        norm: each head of q and of k is normed first, with weights that all heads share; eps, offset: as in `NormFacts`.
        k_scale, v_scale: pages hold k and v divided by these, and q comes multiplied by k's.
    """

    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    style: RopeStyle = "neox"
    norm: bool = False
    eps: float = 0.0
    offset: float = 0.0
    k_scale: float = 1.0
    v_scale: float = 1.0


class RopeWriteReference(PlainKernel):
    """`run(packed, qkv, cos, sin, k_pages, v_pages, slots)` → q `[T, H, D]`; the pages are written in place.

    qkv `[T, (H + 2 Hk) · D]`: q, k, v side by side, consumed; cos, sin `[T, rotary_dim / 2]` float32, any strides between rows; pages and
    slots as in `write_kv`. Packs `q_norm` and `k_norm` `[D]` where facts say so.
    """

    facts: RopeWriteFacts

    def __init__(self, facts: RopeWriteFacts) -> None:
        super().__init__(facts)
        heads, kv, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
        self._sizes = [heads * dim, kv * dim, kv * dim]
        self._norm = RmsNormReference(NormFacts(facts.dtype, dim, facts.eps, facts.offset))
        self._rope = RopeReference(RopeFacts(facts.dtype, dim, facts.rotary_dim, facts.style))
        self._write = WriteKvReference(AttentionFacts(facts.dtype, facts.kv_dtype, heads, kv, dim, dim, facts.page_size, 1.0))

    def run(
        self, packed: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        q, k, v = (part.unflatten(-1, (-1, self.facts.head_dim)) for part in qkv.split(self._sizes, dim=-1))
        if self.facts.norm:
            q, k = self._norm.run({"weight": packed["q_norm"]}, q), self._norm.run({"weight": packed["k_norm"]}, k)
        q, k = self._rope.run(q, k, cos, sin)
        if (self.facts.k_scale, self.facts.v_scale) != (1.0, 1.0):
            q, k, v = q * self.facts.k_scale, k / self.facts.k_scale, v / self.facts.v_scale
        self._write.run(k, v, k_pages, v_pages, slots)
        return q
