"""What references of experts in fewer bits share: matrices that are decoded in their turn, and the memory of decoding all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from pagoda.ops.moe import MoeMlpFacts

MATRICES = ("up", "down")


class StoredExpertsFacts(Protocol):
    """Facts of such a primitive; `shape`: experts, outputs and inputs of "up" or "down" on this rank."""

    @property
    def plain(self) -> MoeMlpFacts: ...

    def shape(self, name: str) -> tuple[int, int, int]: ...


@dataclass(frozen=True)
class InTurn:
    """Looks like the stacked matrices of all experts; each is decoded when it is asked for."""

    decode: Callable[[int], torch.Tensor]
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.decode(expert).to(self.dtype)


def decoded_experts_bytes(facts: StoredExpertsFacts) -> int:
    """What a kernel keeps of one layer that decodes all when it packs."""
    size: int = getattr(torch, facts.plain.dtype).itemsize
    shapes = [facts.shape(name) for name in MATRICES]
    return sum(experts * outputs * (inputs + facts.plain.bias) for experts, outputs, inputs in shapes) * size
