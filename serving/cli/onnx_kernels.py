"""Kernels of a step that is traced into a graph: attention over plain tensors instead of pages, dense experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import Kernel, PlainKernel
from pagoda.ops.attention import AttentionFacts
from pagoda.ops.gguf.decode import decode
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.linear_gguf import EmbeddingGgufFacts
from pagoda.ops.moe import MoeMlpReference
from pagoda.ops.segment_attention import SegmentAttentionFacts


@dataclass
class PlainCache:
    """K and V of one layer `[B, Hk, tokens, D]`: those before the step, and after `append` those after it."""

    k: torch.Tensor
    v: torch.Tensor

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k `[B · S, Hk, D]`, v `[B · S, Hk, Dv]`."""
        rows = self.k.shape[0]
        self.k = torch.cat([self.k, k.unflatten(0, (rows, -1)).transpose(1, 2)], 2)
        self.v = torch.cat([self.v, v.unflatten(0, (rows, -1)).transpose(1, 2)], 2)


@dataclass(frozen=True)
class PlainBatch:
    """Stands for a `PagedBatch` and for `Segments`. `mask` `[B, past + S]` bool: real tokens; `positions` `[B, S]` of the step's tokens."""

    mask: torch.Tensor
    positions: torch.Tensor
    slots: None = None

    def key_positions(self) -> torch.Tensor:
        """`[B, past + S]`: how many real tokens come before."""
        return self.mask.long().cumsum(1) - 1


class PlainWrite(PlainKernel):
    """`write_kv`, into a `PlainCache` that takes the place of both kinds of pages."""

    def run(self, k: torch.Tensor, v: torch.Tensor, cache: PlainCache, same: PlainCache, slots: None) -> None:
        cache.append(k, v)


class PlainAttention(PlainKernel):
    """`paged_attention` over a `PlainCache`."""

    facts: AttentionFacts

    def run(
        self, q: torch.Tensor, cache: PlainCache, same: PlainCache, batch: PlainBatch, plan: Any = None,
        sinks: torch.Tensor | None = None, slopes: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        distance = batch.positions[:, :, None] - batch.key_positions()[:, None, :]
        visible = batch.mask[:, None, :] & (distance >= 0)
        if self.facts.window is not None:
            visible = visible & (distance < self.facts.window)
        if self.facts.chunk is not None:
            visible = visible & (batch.positions[:, :, None] // self.facts.chunk == batch.key_positions()[:, None, :] // self.facts.chunk)
        added = None if slopes is None else -slopes.float()[None, :, None, None] * distance[:, None].float()
        if bias is not None:
            added = bias[:, distance.clamp(0, bias.shape[1] - 1)].transpose(0, 1).float()
        return attend(q, cache.k, cache.v, visible, self.facts.scale, self.facts.softcap, added, sinks)


class PlainSegments(PlainKernel):
    """`segment_attention` over the rows of a `PlainBatch`."""

    facts: SegmentAttentionFacts

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: PlainBatch, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = segments.mask.shape[0]
        distance = segments.positions[:, None, :] - segments.positions[:, :, None]
        visible = segments.mask[:, None, :].expand_as(distance)
        if self.facts.window is not None:
            visible = visible & (distance.abs() <= self.facts.window)
        added = None
        if bias is not None:
            middle = bias.shape[1] // 2
            added = bias[:, distance.clamp(-middle, middle) + middle].transpose(0, 1).float()
        wide = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (k, v))
        return attend(q, *wide, visible, self.facts.scale, None, added, None)


class DenseExperts(MoeMlpReference):
    """`moe_mlp` as three products over all experts, whose weights are zero where they were not chosen."""

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        facts = self.facts
        dense_ETO = torch.zeros(x.shape[0], facts.experts, dtype=weights.dtype).scatter_add(1, ids, weights).t().unsqueeze(2)
        taken = x.unsqueeze(0) * dense_ETO.to(x.dtype) if facts.scale_input else x.unsqueeze(0)
        hidden = self._through(taken, packed["up"], packed["up_bias"] if facts.bias else None)
        out = self._through(self._activate(hidden), packed["down"], packed["down_bias"] if facts.bias else None).to(weights.dtype)
        return (torch.where(dense_ETO != 0, out, 0.0) if facts.scale_input else out * dense_ETO).sum(0).to(x.dtype)

    def _through(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x `[1 or E, T, in]`, weight `[E, out, in]`, bias `[E, out]` → `[E, T, out]`."""
        product = x @ weight.transpose(1, 2)
        return product if bias is None else product + bias.unsqueeze(1)


class DenseTable(PlainKernel):
    """`embedding_gguf` from numbers that were decoded once."""

    facts: EmbeddingGgufFacts

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        return {"weight": decode(weights["weight"], GgmlType[self.facts.kind]).to(getattr(torch, self.facts.dtype))}

    def run(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids.long(), packed["weight"])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float | None,
    added: torch.Tensor | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """q `[B · S, H, D]`, k and v `[B, Hk, N, D]`, visible `[B, S, N]`, added `[1 or B, H, S, N]` → `[B · S, H, Dv]`; softmax is float32."""
    rows, kv_heads = k.shape[0], k.shape[1]
    heads = q.shape[1]
    q_BHSD = q.unflatten(0, (rows, -1)).transpose(1, 2).float()
    keys, values = (x.float().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    logits = q_BHSD @ keys.transpose(2, 3) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if added is not None:
        logits = logits + added
    # The least number and not −∞: a padding token sees nothing, and must not make NaN.
    logits = logits.masked_fill(~visible[:, None], torch.finfo(torch.float32).min)
    if sinks is not None:
        own = sinks.float().view(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
        weights = torch.cat([logits, own], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return (weights @ values).transpose(1, 2).flatten(0, 1).to(q.dtype)


def plain_kernels() -> tuple[Kernel, ...]:
    """All of them, in the place of the references."""
    return (
        Kernel("write_kv", "plain", "pagoda.serving.cli.onnx_kernels:PlainWrite"),
        Kernel("paged_attention", "plain", "pagoda.serving.cli.onnx_kernels:PlainAttention"),
        Kernel("segment_attention", "plain", "pagoda.serving.cli.onnx_kernels:PlainSegments"),
        Kernel("embedding_gguf", "dense", "pagoda.serving.cli.onnx_kernels:DenseTable"),
        Kernel("moe_mlp", "dense", "pagoda.serving.cli.onnx_kernels:DenseExperts"),
    )
