"""Averages of values whose weights decay by channel, with a weight of its own for the newest: `wkv` of RWKV 4 (arXiv:2305.13048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.state import StateBatch, scan

CHUNK = 32
"""Tokens of a chunk in the reference."""

NOTHING = -1e38
"""The largest exponent of a sum without terms."""


@dataclass(frozen=True)
class WkvFacts:
    """`channels` on this rank."""

    dtype: str
    channels: int


class WkvReference(PlainKernel):
    """`run(k, v, decay, first, state, batch)` → `[T, C]`: y[t] = (Σ w · v) / Σ w over tokens i ≤ t, in float32.

    The weight of token t itself is exp(first + k[t]), that of an earlier one exp((t − 1 − i) · decay + k[i]). k, v: `[T, C]`.
    decay (negative), first: `[C]` float32. state: `[pages, 3, C]` float32 view: both sums over exp(m), and m, the largest exponent met
    (decayed). Padding tokens give unspecified finite numbers.
    """

    facts: WkvFacts

    def run(
        self, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, state: torch.Tensor, batch: StateBatch
    ) -> torch.Tensor:
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        decay, first = decay.to(wide), first.to(wide)

        def body(sums: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            k_, v_, there = inputs
            rows = []
            for token in range(k_.shape[1]):
                row, after = _token(sums, k_[:, token], v_[:, token], decay, first)
                sums = torch.where(there[:, token, None, None] > 0, after, sums)
                rows.append(row)
            return torch.stack(rows, dim=1), sums

        there = torch.ones(k.shape[0], dtype=wide, device=k.device)
        return scan(batch, state, (k.to(wide), v.to(wide), there), CHUNK, body, k.shape[1:]).to(k.dtype)


def _token(
    sums: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sums `[B, 3, C]`, k and v `[B, C]` → the output and the sums after this token."""
    above, below, top = sums.unbind(1)
    top = torch.where(below > 0, top, NOTHING)
    largest = torch.maximum(top, first + k)
    old, new = torch.exp(top - largest), torch.exp(first + k - largest)
    out = (old * above + new * v) / (old * below + new)
    largest = torch.maximum(top + decay, k)
    old, new = torch.exp(top + decay - largest), torch.exp(k - largest)
    return out, torch.stack([old * above + new * v, old * below + new, largest], dim=1)
