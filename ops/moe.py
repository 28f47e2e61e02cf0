"""Mixture of experts: `route` chooses experts for each token, `moe_mlp` runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.activation import ACTIVATIONS


@dataclass(frozen=True)
class RouteFacts:
    """How router logits `[T, experts]` become `top_k` experts and their weights.

    Attributes:
        score: "softmax" before the choice, "softmax_after" over the chosen logits, "sigmoid" of each, or "sparsemixer"
            (arXiv:2409.12136): the best of those left, weighted by a softmax over what is left within 2 · `jitter` of it, relatively.
        renormalize: chosen weights are divided by their sum.
        groups, top_groups: experts are chosen within the best `top_groups` of `groups` groups; 1, 1 means no groups.
        group_score: a group's score is its best expert ("max") or the sum of its two best ("top2").
        bias: a correction bias is added for the choice only.
        scale: multiplies the weights.
    """

    dtype: str
    experts: int
    top_k: int
    score: Literal["softmax", "softmax_after", "sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    bias: bool = False
    scale: float = 1.0
    jitter: float = 0.0


class RouteReference(PlainKernel):
    """`run(logits, bias=None)`: logits `[T, E]`, bias `[E]` → (weights `[T, top_k]` float32, ids `[T, top_k]` int64), best choice first."""

    facts: RouteFacts

    def run(self, logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float() if logits.dtype != torch.float64 else logits
        if self.facts.score == "sparsemixer":
            return self._mixed(wide)
        scores = self._scores(wide)
        choice = scores if bias is None else scores + bias.to(wide.dtype)
        if self.facts.groups > 1:
            choice = self._within_groups(choice)
        ids = choice.topk(self.facts.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if self.facts.score == "softmax_after":
            weights = weights.softmax(-1)
        if self.facts.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.facts.scale, ids

    def _mixed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, weights, ids = logits, [], []
        for _ in range(self.facts.top_k):
            best, chosen = left.max(-1, keepdim=True)
            far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * self.facts.jitter
            weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
            ids.append(chosen)
            left = left.scatter(-1, chosen, float("-inf"))
        return torch.cat(weights, -1) * self.facts.scale, torch.cat(ids, -1)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.facts.score == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid() if self.facts.score == "sigmoid" else logits

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.unflatten(-1, (self.facts.groups, -1))
        best = grouped.amax(-1) if self.facts.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(self.facts.top_groups, -1).indices, 1.0)
        return grouped.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(-2)


@dataclass(frozen=True)
class MoeMlpFacts:
    """`experts` gated feed-forwards of `hidden` numbers for inputs `width` wide, `top_k` of them per token.

    Attributes:
        activation: name in `ops.activation.ACTIVATIONS`; `gated`: gate and up are stacked, gate first.
        bias: experts have biases.
        alpha, limit: clamped SwiGLU of GPT-OSS, `gate · σ(alpha · gate) · (up + 1)`, when `limit` is given.
        first: experts of this rank are `[first, first + local)`; others contribute nothing.
        scale_input: weights multiply the input instead of the output (Llama 4).
    """

    dtype: str
    experts: int
    width: int
    hidden: int
    top_k: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    alpha: float | None = None
    limit: float | None = None
    first: int = 0
    local: int = 0
    scale_input: bool = False


class MoeMlpReference(PlainKernel):
    """`run(packed, x, weights, ids)`: x `[T, width]`, weights and ids `[T, top_k]` → `[T, width]`.

    Packs `up [E, 2·hidden or hidden, width]`, `down [E, width, hidden]`, and `up_bias`, `down_bias` where facts say so.
    Every expert sees every token with its weight or zero: static shapes, no synchronisation.
    """

    facts: MoeMlpFacts

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        local = self.facts.local or self.facts.experts
        dense = torch.zeros(x.shape[0], self.facts.experts, dtype=weights.dtype, device=x.device)
        dense = dense.scatter_add(1, ids, weights)[:, self.facts.first : self.facts.first + local]
        total = torch.zeros(x.shape, dtype=torch.promote_types(weights.dtype, x.dtype), device=x.device)
        for expert in range(local):
            weight = dense[:, expert : expert + 1]
            taken = x * weight.to(x.dtype) if self.facts.scale_input else x
            out = self._expert(packed, expert, taken).to(total.dtype)
            total = total + torch.where(weight != 0, out if self.facts.scale_input else out * weight, 0.0)
        return total.to(x.dtype)

    def _expert(self, packed: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
        bias = self.facts.bias
        hidden = F.linear(x, packed["up"][expert], packed["up_bias"][expert] if bias else None)
        return F.linear(self._activate(hidden), packed["down"][expert], packed["down_bias"][expert] if bias else None)

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.facts.gated:
            return ACTIVATIONS[self.facts.activation](hidden)
        gate, up = hidden.chunk(2, dim=-1)
        if self.facts.limit is None or self.facts.alpha is None:
            return ACTIVATIONS[self.facts.activation](gate) * up
        gate, up = gate.clamp(max=self.facts.limit), up.clamp(-self.facts.limit, self.facts.limit)
        return gate * torch.sigmoid(self.facts.alpha * gate) * (up + 1)
