"""The gated delta rule (arXiv:2412.06464), with one decay per head or one per key channel (Kimi Delta, arXiv:2510.26692).

It begins at what projections and convolution give: unit lengths, decays and amounts are made within.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.scan import decay_between
from pagoda.ops.state import StateBatch, scan

CHUNK = 16
"""Tokens of a chunk in the reference."""


@dataclass(frozen=True)
class DeltaFacts:
    """`heads` on this rank with values of `v_dim`; `k_heads` heads of `k_dim` for keys and queries, neighbouring heads share one.

    `by_channel`: each key channel decays by itself; else a head does. `double`: amounts are in (0, 2), else in (0, 1).
    """

    dtype: str
    k_heads: int
    heads: int
    k_dim: int
    v_dim: int
    by_channel: bool = False
    double: bool = False


class GatedDeltaReference(PlainKernel):
    """`run(q, k, v, step, beta, bias, rates, state, batch)` → `[T, H, V]`, in float32, for each token
    S = exp(decay) · S; S = S + amount · k ⊗ (v − k · S); out = q · S, where decay = rates · softplus(step + bias), amount = sigmoid(beta)
    (twice that where facts say `double`), k is k / √(Σ k² + 1e-6), and q the same of q, times K^−½.

    q, k: `[T, Hk, K]`. v: `[T, H, V]`. step: `[T, H]`, or `[T, H, K]` by channel. beta: `[T, H]`. bias: `[H]`, or `[H, K]`, float32.
    rates: `[H]` float32, negative. state: `[pages, H, K, V]` float32 view of S. Padding tokens give unspecified finite numbers.
    """

    facts: DeltaFacts

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, beta: torch.Tensor, bias: torch.Tensor,
        rates: torch.Tensor, state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        wide = torch.float64 if v.dtype == torch.float64 else torch.float32
        repeat = self.facts.heads // self.facts.k_heads
        q, k = (_unit(x.to(wide)).repeat_interleave(repeat, 1) for x in (q, k))
        decay = F.softplus(step.to(wide) + bias) * (rates[:, None] if self.facts.by_channel else rates)
        decay = decay.clamp(min=-100.0)  # nothing is left in float32, and differences of sums keep their digits
        amount = torch.sigmoid(beta.to(wide)) * (2.0 if self.facts.double else 1.0)
        body = _channel_chunk if self.facts.by_channel else _head_chunk
        inputs = (q * self.facts.k_dim**-0.5, k, v.to(wide), decay, amount)
        return scan(batch, state, inputs, CHUNK, body, v.shape[1:]).to(v.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _head_chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    so_far = log_decay.cumsum(1)
    between = decay_between(so_far)
    keys = torch.einsum("blhk,bmhk->bhlm", k, k) * between
    queries = torch.einsum("blhk,bmhk->bhlm", q, k) * between
    return _solve(state, q, k, v, so_far[..., None], beta, keys, queries)


def _channel_chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    so_far = log_decay.cumsum(1)
    later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)[None, :, :, None, None]
    between = torch.exp((so_far[:, :, None] - so_far[:, None]).masked_fill(later, float("-inf")))
    keys = torch.einsum("blhk,bmhk,blmhk->bhlm", k, k, between)
    queries = torch.einsum("blhk,bmhk,blmhk->bhlm", q, k, between)
    return _solve(state, q, k, v, so_far, beta, keys, queries)


def _solve(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, so_far: torch.Tensor, beta: torch.Tensor,
    keys: torch.Tensor, queries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What each token writes, u = beta · (v − k · S), depends on those before it in the chunk: a unit lower triangular system.

    keys, queries `[B, H, L, L]`: products with the keys of tokens m ≤ l, decayed from m to l.
    """
    decay = torch.exp(so_far)
    wanted = beta[..., None] * (v - torch.einsum("blhk,bhkv->blhv", k * decay, state))
    system = (keys * beta.transpose(1, 2)[..., None]).tril(-1)
    unit = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
    written = torch.linalg.solve_triangular(system + unit, wanted.transpose(1, 2), upper=False, unitriangular=True)
    out = torch.einsum("blhk,bhkv->blhv", q * decay, state) + torch.einsum("bhlm,bhmv->blhv", queries, written)
    to_end = torch.exp(so_far[:, -1:] - so_far)
    added = torch.einsum("blhk,bhlv->bhkv", k * to_end, written)
    return out, state * decay[:, -1].expand(-1, -1, state.shape[2])[..., None] + added
