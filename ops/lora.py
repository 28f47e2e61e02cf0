"""Low-rank adapters: `lora_delta` adds to a linear layer's outputs what each token's adapter changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pagoda.hal.kernel import PlainKernel


@dataclass(frozen=True)
class LoraFacts:
    """`slots` adapters of rank up to `rank` for a linear layer whose outputs are `parts` side by side (q, k, v), with factors for each.

    Unused ranks, parts and slots hold zeros.
    """

    dtype: str
    in_features: int
    parts: tuple[int, ...]
    slots: int
    rank: int

    @property
    def out_features(self) -> int:
        return sum(self.parts)

    @property
    def down_shape(self) -> tuple[int, int, int]:
        return self.slots, len(self.parts) * self.rank, self.in_features

    @property
    def up_shape(self) -> tuple[int, int, int]:
        return self.slots, self.rank, self.out_features


class LoraDeltaReference(PlainKernel):
    """`run(out, x, down, up, slots)`, in place: `out[t, part] += (x[t] @ down[s, part]ᵀ) @ up[s, :, part]` with s = `slots[t]`
    (arXiv:2106.09685).

    out `[T, out_features]` contiguous, x `[T, in_features]`, down `[S, parts · rank, in_features]`, up `[S, rank, out_features]`, slots
    `[T]` int32. Rows of slot −1 keep their bits. Numbers in up and down are finite.
    """

    facts: LoraFacts

    def run(self, out: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, slots: torch.Tensor) -> None:
        # All slots at once, those of others masked: two dense products, whatever the mixture of adapters.
        facts, chosen = self.facts, slots[:, None] == torch.arange(self.facts.slots, device=slots.device)
        low = F.linear(x, down.flatten(0, 1)).view(-1, facts.slots, len(facts.parts), facts.rank)
        low = low.masked_fill(~chosen[:, :, None, None], 0)
        pieces = zip(low.unbind(2), up.split(facts.parts, dim=-1), strict=True)
        delta = torch.cat([part.flatten(1) @ factors.flatten(0, 1) for part, factors in pieces], dim=-1)
        out.copy_(torch.where(slots[:, None] >= 0, out + delta, out))
