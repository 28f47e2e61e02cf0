"""Experts whose weights are float8 (e4m3) codes with scales: `moe_mlp_fp8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from pagoda.hal.kernel import PlainKernel
from pagoda.ops.linear_fp8 import dequantised, quantised
from pagoda.ops.moe import MoeMlpFacts, MoeMlpReference
from pagoda.ops.stored_experts import MATRICES, InTurn


@dataclass(frozen=True)
class MoeMlpFp8Facts:
    """`moe_mlp` as `plain` says, with matrices in e4m3.

    Attributes:
        block: 0: a scale for each output; else for each square of so many weights, those at the edges cut off. Gate and up, which are
            stacked, have squares of their own.
    """

    plain: MoeMlpFacts
    block: int = 0

    @property
    def dtype(self) -> str:
        return self.plain.dtype

    @property
    def experts_here(self) -> int:
        return self.plain.local or self.plain.experts

    def pieces(self, name: str) -> int:
        """Matrices that are stacked in one: gate and up are."""
        return 2 if name == "up" and self.plain.gated else 1

    def shape(self, name: str) -> tuple[int, int, int]:
        """Of "up" or "down" on this rank: experts, outputs, inputs."""
        wide = self.plain.hidden * self.pieces(name)
        return (self.experts_here, wide, self.plain.width) if name == "up" else (self.experts_here, self.plain.width, self.plain.hidden)

    def scale_shape(self, name: str) -> tuple[int, ...]:
        experts, outputs, inputs = self.shape(name)
        if not self.block:
            return (experts, outputs)
        pieces = self.pieces(name)
        return (experts, pieces * -(-outputs // pieces // self.block), -(-inputs // self.block))

    @property
    def nbytes(self) -> int:
        """Of all that the primitive packs."""
        size: int = getattr(torch, self.dtype).itemsize
        shapes = [(self.shape(name), self.scale_shape(name)) for name in MATRICES]
        return sum(prod(shape) + 4 * prod(scales) + self.plain.bias * shape[0] * shape[1] * size for shape, scales in shapes)


def expert_numbers(facts: MoeMlpFp8Facts, packed: Any, name: str, expert: int) -> torch.Tensor:
    """One expert's matrix "up" or "down" in the facts' dtype."""
    pieces = facts.pieces(name)
    codes, scales = packed[name][expert].chunk(pieces), packed[f"{name}_scale"][expert].chunk(pieces)
    dtype = getattr(torch, facts.dtype)
    return torch.cat([dequantised(code, scale, facts.block, dtype) for code, scale in zip(codes, scales, strict=True)])


def quantised_experts(facts: MoeMlpFp8Facts, loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain experts as the primitive packs them; one expert at a time, since scaling takes several times its memory."""
    made = dict(loaded)
    for name in MATRICES:
        pairs = [quantised(piece, facts.block) for expert in loaded[name] for piece in expert.chunk(facts.pieces(name))]
        made[name] = torch.cat([codes for codes, _ in pairs]).view(facts.shape(name))
        made[f"{name}_scale"] = torch.cat([scale for _, scale in pairs]).view(facts.scale_shape(name))
    return made


class MoeMlpFp8Reference(PlainKernel):
    """`run(packed, x, weights, ids)` as of `moe_mlp`.

    Packs `up` and `down` in e4m3, `up_scale` and `down_scale` in float32 (`MoeMlpFp8Facts.scale_shape`), biases plain. An expert is made
    numbers of x's dtype when it is its turn, on every run. A kernel may round rows to e4m3 too, and then says so by its `eps`.
    """

    facts: MoeMlpFp8Facts

    def __init__(self, facts: MoeMlpFp8Facts) -> None:
        super().__init__(facts)
        self._plain = MoeMlpReference(facts.plain)

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        matrices = {name: InTurn(partial(expert_numbers, self.facts, packed, name), x.dtype) for name in MATRICES}
        return self._plain.run({**packed, **matrices}, x, weights, ids)


class MoeMlpFp8Dequantised(PlainKernel):
    """The same, decoded once by `pack`, at the memory of the computing dtype."""

    facts: MoeMlpFp8Facts

    def __init__(self, facts: MoeMlpFp8Facts) -> None:
        super().__init__(facts)
        self._plain = MoeMlpReference(facts.plain)

    def pack(self, weights: Mapping[str, torch.Tensor], out: Any | None = None) -> Any:
        packed = out if out is not None else {}
        for name in MATRICES:
            if out is None:
                packed[name] = torch.empty(self.facts.shape(name), dtype=getattr(torch, self.facts.dtype), device=weights[name].device)
            for expert, matrix in enumerate(packed[name]):
                matrix.copy_(expert_numbers(self.facts, weights, name, expert))
        for name in (f"{name}_bias" for name in MATRICES if self.facts.plain.bias):
            packed[name] = weights[name].clone() if out is None else packed[name].copy_(weights[name])
        return packed

    def run(self, packed: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self._plain.run(packed, x, weights, ids)
