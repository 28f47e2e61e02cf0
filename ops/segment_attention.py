"""Attention of whole sequences over themselves, in both directions and without a cache: `segment_attention`, for encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pagoda.hal.kernel import PlainKernel


@dataclass(frozen=True)
class SegmentAttentionFacts:
    """Static facts of one layer.

    Attributes:
        dtype: of q, k, v and of the output.
        num_heads, num_kv_heads, head_dim: geometry on this rank; heads are grouped.
        scale: multiplies q·k.
        window: token i sees tokens j with |i − j| ≤ window; None means all of its segment.
        bias: a number per head and distance is added to the logits.
    """

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    bias: bool = False


@dataclass(frozen=True)
class Segments:
    """Sequences one after another: segment r is tokens `[start[r], start[r+1])`.

    Attributes:
        start: `[R + 1]` int32.
        bounds: the same on the host, where it is known there.
    """

    start: torch.Tensor
    bounds: NDArray[np.int32] | None = None


_QUERIES = 32
"""Query tokens that the reference handles at a time."""


class SegmentAttentionReference(PlainKernel):
    """`run(q, k, v, segments, bias=None)`: q `[T, H, D]`, k and v `[T, Hk, D]` → `[T, H, D]`.

    bias: `[H, 2L − 1]` float32, the number for j − i at j − i + L − 1, beyond the outermost ones. Softmax is float32. Tokens past
    the last segment give unspecified finite numbers.
    """

    facts: SegmentAttentionFacts

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, bias: torch.Tensor | None = None) -> torch.Tensor:
        token = torch.arange(q.shape[0], device=q.device)
        owner = torch.searchsorted(segments.start[1:].contiguous(), token.to(torch.int32), right=True)
        parts = [self._attend(q, k, v, owner, token[i : i + _QUERIES], bias) for i in range(0, q.shape[0], _QUERIES)]
        return torch.cat(parts) if parts else torch.empty_like(q)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        q_TGHD = q[rows].to(wide).unflatten(1, (self.facts.num_kv_heads, -1))
        logits = torch.einsum("tghd,kgd->tghk", q_TGHD, k.to(wide)) * self.facts.scale
        distance = torch.arange(k.shape[0], device=q.device) - rows[:, None]
        visible = owner[rows, None] == owner
        if self.facts.window is not None:
            visible = visible & (distance.abs() <= self.facts.window)
        if bias is not None:
            middle = bias.shape[1] // 2
            added = bias[:, (distance.clamp(-middle, middle) + middle)].to(wide)  # [H, t, K]
            logits = logits + added.transpose(0, 1).unflatten(1, (self.facts.num_kv_heads, -1))
        weights = logits.masked_fill(~visible[:, None, None, :], float("-inf")).softmax(-1)
        return torch.einsum("tghk,kgd->tghd", weights, v.to(wide)).flatten(1, 2).to(q.dtype)


def _step(window: int) -> int:
    """Queries of a stretch."""
    return max(window, 64)


class SegmentAttentionTorch(PlainKernel):
    """torch's own fused attention, a segment at a time: the host must know where they end, and waits for the device where it does not."""

    facts: SegmentAttentionFacts

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, bias: torch.Tensor | None = None) -> torch.Tensor:
        bounds: Any = segments.bounds if segments.bounds is not None else segments.start.cpu().numpy()
        out = torch.zeros_like(q)
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if first < stop:
                out[first:stop] = self._segment(q[first:stop], k[first:stop], v[first:stop], bias)
        return out

    def _segment(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        facts, window = self.facts, self.facts.window
        if window is not None and q.shape[0] >= 2 * (_step(window) + 2 * window):
            return self._stretches(q, k, v, bias, window)
        q_, k_, v_ = (t.transpose(0, 1)[None] for t in (q, k, v))
        grouped = facts.num_heads != facts.num_kv_heads
        mask = self._mask(q, bias)
        return F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, scale=facts.scale, enable_gqa=grouped)[0].transpose(0, 1)

    def _stretches(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, window: int) -> torch.Tensor:
        """Queries some at a time, with the keys that their windows reach: work grows with the window and not with the segment."""
        facts, length, step = self.facts, q.shape[0], _step(window)
        count = -(-length // step)
        more, reach = count * step - length, step + 2 * window
        q_ = F.pad(q, (0, 0, 0, 0, 0, more)).unflatten(0, (count, step)).transpose(1, 2)
        k_, v_ = (F.pad(t, (0, 0, 0, 0, window, window + more)).unfold(0, reach, step).transpose(2, 3) for t in (k, v))
        key = torch.arange(reach, device=q.device) - window
        distance = key - torch.arange(step, device=q.device)[:, None]
        place = key + step * torch.arange(count, device=q.device)[:, None]
        mask = ((distance.abs() <= window) & ((place >= 0) & (place < length))[:, None])[:, None]  # [count, 1, step, reach]
        if bias is not None:
            middle = bias.shape[1] // 2
            added = bias[:, distance.clamp(-middle, middle) + middle]
            mask = added.expand(count, -1, -1, -1).masked_fill(~mask, float("-inf")).to(q.dtype)
        grouped = facts.num_heads != facts.num_kv_heads
        parts = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask, scale=facts.scale, enable_gqa=grouped)
        return parts.transpose(1, 2).flatten(0, 1)[:length]

    def _mask(self, q: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What is added to the logits, or which are seen, `[1, H or 1, L, L]`; None where all are as they are."""
        length, window = q.shape[0], self.facts.window
        if bias is None and (window is None or length <= window + 1):
            return None
        at = torch.arange(length, device=q.device)
        distance = at - at[:, None]
        near = None if window is None else distance.abs() <= window
        if bias is None:
            return near[None, None] if near is not None else None
        middle = bias.shape[1] // 2
        added = bias[:, distance.clamp(-middle, middle) + middle]
        return (added if near is None else added.masked_fill(~near, float("-inf")))[None].to(q.dtype)
