"""The residual stream with parts that are still to be summed over ranks: the same as with sums, whoever reads it and however."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from pagoda.backends.torch_host.comm import LoneCommunicator
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.decoder import Stream
from pagoda.models.spec import Norm
from pagoda.ops.norm import AddRmsNormReference, NormFacts, RmsNormReference

WIDTH, SPEC = 24, Norm("rms", 1e-5, 1.0)


@dataclass
class AlikeRanks(LoneCommunicator):
    """Two ranks with the same parts, as one of them sees it. joins: has the sum and the norm as one kernel."""

    joins: bool
    calls: list[str] = field(default_factory=list)

    def all_reduce(self, x, op="sum"):
        self.calls.append("all_reduce")
        return x.mul_(2)

    def all_reduce_add_norm(self, x, residual, weight, eps, offset=0.0):
        if not self.joins:
            return None
        self.calls.append("all_reduce_add_norm")
        facts = NormFacts("float32", WIDTH, eps, offset, weight is not None)
        return AddRmsNormReference(facts).run({"weight": weight}, 2 * x, residual)


def norm_block(fused: bool) -> NormBlock:
    facts, tensors = NormFacts("float32", WIDTH, SPEC.eps, SPEC.offset), {"weight": torch.linspace(-1, 1, WIDTH)}
    return NormBlock(RmsNormReference(facts), AddRmsNormReference(facts) if fused else None, tensors, SPEC)


def entry(pending: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (pending + total) * 3, pending + total


READS: dict[str, Callable[[Stream, NormBlock], object]] = {
    "read": lambda stream, norm: stream.read(norm),
    "read plain": lambda stream, norm: stream.read(None),
    "tap": lambda stream, norm: (stream.tap(), stream.read(norm)),
    "peek": lambda stream, norm: (stream.peek(), stream.pending, stream.read(norm)),
    "enter": lambda stream, norm: stream.enter(entry),
    "more": lambda stream, norm: (stream.add(torch.ones(5, WIDTH)), stream.read(norm)),
    "rows": lambda stream, norm: (stream.add_rows(torch.tensor([1, 3]), torch.ones(2, WIDTH)), stream.read(norm)),
    "restart": lambda stream, norm: (stream.restart(torch.ones(5, WIDTH)), stream.read(norm)),
}


def flat(result: object) -> list[torch.Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", READS)
def test_parts_are_summed_once(how: str, fused: bool, joins: bool) -> None:
    start, first, part = (torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    ranks, norm = AlikeRanks(joins), norm_block(fused)
    stream, plain = Stream(start.clone()), Stream(start.clone())
    stream.add(first.clone()), plain.add(first.clone())
    stream.add(part.clone(), ranks), plain.add(2 * part)
    stream.read(norm), plain.read(norm)
    stream.add(part.clone(), ranks), plain.add(2 * part)
    for got, want in zip(flat(READS[how](stream, norm)), flat(READS[how](plain, norm)), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(stream.read(None), plain.read(None))
    assert not stream.pending
    joined = joins and fused and how == "read"
    summed_for = ["all_reduce"] if how != "restart" else []
    assert ranks.calls == ["all_reduce", *(["all_reduce_add_norm"] if joined else summed_for)]
