"""Experts whose weights stay in ggml blocks: `moe_mlp_gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.gguf.decode import decode, decode_into
from pagoda.ops.gguf.types import GgmlType
from pagoda.ops.moe import MoeMlpFacts, MoeMlpReference
from pagoda.ops.stored_experts import MATRICES, InTurn


@dataclass(frozen=True)
class MoeMlpGgufFacts:
    """`moe_mlp` as `plain` says, with matrices in blocks: gate and up in `up_kind`, down in `down_kind`."""

    plain: MoeMlpFacts
    up_kind: str
    down_kind: str

    @property
    def dtype(self) -> str:
        return self.plain.dtype

    def kind(self, name: str) -> GgmlType:
        """The format of "up" or "down"."""
        return GgmlType[self.up_kind if name == "up" else self.down_kind]

    @property
    def experts_here(self) -> int:
        return self.plain.local or self.plain.experts

    def shape(self, name: str) -> tuple[int, int, int]:
        """Numbers of "up" or "down" on this rank: experts, outputs, inputs."""
        wide = self.plain.hidden * (2 if self.plain.gated else 1)
        return (self.experts_here, wide, self.plain.width) if name == "up" else (self.experts_here, self.plain.width, self.plain.hidden)


class MoeMlpGgufReference(PlainKernel):
    """`run(packed, x, weights, ids)` as of `moe_mlp`.

    Packs `up` and `down` as uint8 `[E, outputs, row_bytes]`, biases plain. An expert is decoded when it is its turn, on every run.
    """

    facts: MoeMlpGgufFacts

    def __init__(self, facts: MoeMlpGgufFacts) -> None:
        super().__init__(facts)
        self._plain = MoeMlpReference(facts.plain)

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        def numbers(name: str, expert: int) -> torch.Tensor:
            return decode(packed[name][expert], self.facts.kind(name))

        matrices = {name: InTurn(partial(numbers, name), x.dtype) for name in MATRICES}
        return self._plain.run({**packed, **matrices}, x, weights, ids)


class MoeMlpGgufDequantised(PlainKernel):
    """The same, decoded once by `pack`, at the memory of the computing dtype."""

    facts: MoeMlpGgufFacts

    def __init__(self, facts: MoeMlpGgufFacts) -> None:
        super().__init__(facts)
        self._plain = MoeMlpReference(facts.plain)

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        packed = out if out is not None else {}
        for name in MATRICES:
            if out is None:
                packed[name] = torch.empty(self.facts.shape(name), dtype=getattr(torch, self.facts.dtype), device=weights[name].device)
            decode_into(packed[name].flatten(0, 1), weights[name].flatten(0, 1), self.facts.kind(name))
        for name in (f"{name}_bias" for name in MATRICES if self.facts.plain.bias):
            packed[name] = weights[name].clone() if out is None else packed[name].copy_(weights[name])
        return packed

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._plain.run(packed, x, weights, ids)
