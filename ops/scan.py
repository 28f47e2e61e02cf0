"""State spaces: `selective_scan` (arXiv:2312.00752), and `ssd_scan` (arXiv:2405.21060), which linear attention with decay is too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.state import StateBatch, scan

CHUNK = 32
"""Tokens of a chunk in the references."""


@dataclass(frozen=True)
class SelectiveScanFacts:
    """`channels` on this rank with `state` numbers each."""

    dtype: str
    channels: int
    state: int


class SelectiveScanReference(PlainKernel):
    """`run(x, dt, a, b, c, d, state, batch)` → `[T, D]`: h = exp(dt · a) · h + dt · x · b; y = c · h + d · x, in float32.

    x, dt: `[T, D]`, dt ≥ 0, float32 or x's dtype. a: `[D, N]` float32, negative. b, c: `[T, N]`. d: `[D]` float32.
    state: `[pages, D, N]` float32 view of h. Padding tokens give unspecified finite numbers.
    """

    facts: SelectiveScanFacts

    def run(
        self, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor,
        state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x_wide, a = x.to(wide), a.to(wide)

        def body(h: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x_, dt_, b_, c_ = inputs
            decay = torch.exp(dt_[..., None] * a)
            states = linear_recurrence(decay, (dt_ * x_)[..., None] * b_[:, :, None, :], h)
            return torch.einsum("bldn,bln->bld", states, c_), states[:, -1]

        y = scan(batch, state, (x_wide, dt.to(wide), b.to(wide), c.to(wide)), CHUNK, body, x.shape[1:])
        return (y + x_wide * d.to(wide)).to(x.dtype)


def linear_recurrence(decay: torch.Tensor, added: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """h[l] = decay[l] · h[l − 1] + added[l] along dimension 1, in log2(L) passes; `before`: h[−1]. `[B, L, …]` → `[B, L, …]`."""
    added = torch.cat([added[:, :1] + decay[:, :1] * before[:, None], added[:, 1:]], dim=1)
    length, step = decay.shape[1], 1
    while step < length:
        added = torch.cat([added[:, :step], added[:, step:] + decay[:, step:] * added[:, :-step]], dim=1)
        decay = torch.cat([decay[:, :step], decay[:, step:] * decay[:, :-step]], dim=1)
        step *= 2
    return added


@dataclass(frozen=True)
class SsdFacts:
    """`heads` on this rank of `head_dim` values, `groups` of them sharing b and c of `state` numbers; steps are clamped to `limits`."""

    dtype: str
    heads: int
    head_dim: int
    groups: int
    state: int
    limits: tuple[float, float] = (0.0, math.inf)


class SsdScanReference(PlainKernel):
    """`run(x, step, bias, a, b, c, d, state, batch)` → `[T, H, P]`: S = exp(dt · a) · S + dt · x ⊗ b; y = S · c + d · x, in float32, where
    dt = softplus(step + bias), clamped to the facts' limits.

    x: `[T, H, P]`. step: `[T, H]`. bias: `[H]` float32; both None: dt is 1. a: `[H]` float32, negative. b, c: `[T, G, N]`; head h uses
    group h · G // H. d: `[H]` float32 or None. state: `[pages, H, P, N]` float32 view of S. Linear attention with a decay per head is this
    without steps, v as x, k as b, q as c. Padding tokens give unspecified finite numbers.
    """

    facts: SsdFacts

    def run(
        self, x: torch.Tensor, step: torch.Tensor | None, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        d: torch.Tensor | None, state: torch.Tensor, batch: StateBatch,
    ) -> torch.Tensor:  # fmt: skip
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x_wide, repeat = x.to(wide), self.facts.heads // self.facts.groups
        if step is None or bias is None:
            dt = torch.ones(x.shape[:2], dtype=wide, device=x.device)
        else:
            dt = F.softplus(step.to(wide) + bias.to(wide)).clamp(*self.facts.limits)
        inputs = (x_wide * dt[..., None], dt * a.to(wide), b.to(wide), c.to(wide))
        y = scan(batch, state, inputs, CHUNK, partial(_ssd_chunk, repeat), x.shape[1:])
        return (y if d is None else y + x_wide * d.to(wide)[:, None]).to(x.dtype)


def _ssd_chunk(
    repeat: int, state: torch.Tensor, x: torch.Tensor, log_decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """state `[B, H, P, N]`, x `[B, L, H, P]`, log_decay `[B, L, H]`, b and c `[B, L, G, N]`."""
    so_far = log_decay.cumsum(1)
    weights = torch.einsum("blgn,bmgn->bglm", c, b).repeat_interleave(repeat, 1) * decay_between(so_far)
    inside = torch.einsum("bhlm,bmhp->blhp", weights, x)
    c, b = c.repeat_interleave(repeat, 2), b.repeat_interleave(repeat, 2)
    before = torch.einsum("bhpn,blhn->blhp", state, c) * torch.exp(so_far)[..., None]
    to_end = torch.exp(so_far[:, -1:] - so_far)
    added = torch.einsum("blhp,blhn->bhpn", x * to_end[..., None], b)
    return inside + before, state * torch.exp(so_far[:, -1])[..., None, None] + added


def decay_between(so_far: torch.Tensor) -> torch.Tensor:
    """`[B, L, H]` sums of logarithms → `[B, H, L, L]`: decay from token m (after it) to token l, zero where m > l."""
    by_head = so_far.transpose(1, 2)
    length = so_far.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=so_far.device).triu(1)
    return torch.exp((by_head[..., :, None] - by_head[..., None, :]).masked_fill(later, float("-inf")))
