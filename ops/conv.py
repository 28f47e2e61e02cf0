"""Causal depthwise convolution over each request's tokens, its last inputs kept as state: `causal_conv1d`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.state import StateBatch, load_state, owners


@dataclass(frozen=True)
class ConvFacts:
    """`channels` on this rank, `taps` weights each; then `activation`. `bias`: a number per channel is added before it."""

    dtype: str
    channels: int
    taps: int
    bias: bool = False
    activation: Literal["silu", "none"] = "silu"


class CausalConvReference(PlainKernel):
    """`run(packed, x, state, batch)`: x `[T, C]` → `[T, C]`; out[t] = Σ_j weight[:, j] · x[t − taps + 1 + j], zeros before the first.

    state: `[pages, C, taps − 1]` view, a request's last inputs, oldest first; read and written as `batch` (`StateBatch`) says.
    Packs `weight [C, taps]`, and `bias [C]` where facts say so. Padding tokens give unspecified finite numbers.
    """

    facts: ConvFacts

    def run(self, packed: Any, x: torch.Tensor, state: torch.Tensor, batch: StateBatch) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        tokens, taps = x.shape[0], self.facts.taps
        if tokens == 0 or batch.read.shape[0] == 0:
            return torch.zeros_like(x)
        inputs, before, weight = x.to(wide), load_state(state, batch, wide), packed["weight"].to(wide)
        owner = owners(batch.query_start, tokens)
        token = torch.arange(tokens, device=x.device)
        offset = token - batch.query_start[owner]
        total = inputs * weight[:, taps - 1]
        for back in range(1, taps):
            here = inputs[(token - back).clamp(min=0)]
            earlier = before[owner, :, (taps - 1 + offset - back).clamp(min=0, max=taps - 2)]
            total = total + torch.where((offset >= back)[:, None], here, earlier) * weight[:, taps - 1 - back]
        self._keep(inputs, before, state, batch)
        if self.facts.bias:
            total = total + packed["bias"].to(wide)
        return (F.silu(total) if self.facts.activation == "silu" else total).to(x.dtype)

    def _keep(self, inputs: torch.Tensor, before: torch.Tensor, state: torch.Tensor, batch: StateBatch) -> None:
        kept = self.facts.taps - 1
        start, end = batch.query_start[:-1, None], batch.query_start[1:, None]
        at = end - kept + torch.arange(kept, device=inputs.device)
        new = inputs[at.clamp(min=0, max=inputs.shape[0] - 1).long()].transpose(1, 2)
        old_at = (at - start + kept).clamp(min=0, max=kept - 1).long()
        old = before.gather(2, old_at[:, None, :].expand_as(before))
        state[batch.write] = torch.where((at >= start)[:, None, :], new, old).to(state.dtype)
