"""How a sublayer begins where one kernel does the residual addition, the norm and its first product (`norm_gemm`)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from pagoda.models.blocks.linear import Linear
from pagoda.models.blocks.norm import NormBlock
from pagoda.models.blocks.paged import Step
from pagoda.models.builder import Builder


class Enterable(Protocol):
    """A sublayer whose first product may be done for it."""

    first: Any

    def rest(self, product: torch.Tensor, step: Step, activated: bool = False) -> torch.Tensor:
        """From the first product on; `activated`: it has gone through the gated activation."""
        ...


class Entry:
    """The first product of a sublayer, with the stream's addition and norm before it and, where `activated`, the activation after it."""

    __slots__ = ("_packed", "_run", "activated")

    def __init__(self, run: Any, packed: Any, activated: bool) -> None:
        self._run, self._packed, self.activated = run, packed, activated

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(product `[T, out]`, x + residual); `residual` may be overwritten."""
        result: tuple[torch.Tensor, torch.Tensor] = self._run(self._packed, x, residual)
        return result


def entry_of(build: Builder, path: str, block: Enterable | None, norm: NormBlock | None) -> Entry | None:
    """That of the sublayer at `path`, where fusion found one and the product's weights lie as they are."""
    site = build.fusion("norm_gemm", path)
    if site is None or site.facts is None or block is None or norm is None:
        return None
    first = block.first
    if not isinstance(first, Linear) or first.plain != site.facts.gemm:  # type: ignore[attr-defined]
        return None
    kernel = build.kernel("norm_gemm", site.facts)
    if not build.loading:
        return None
    packed = kernel.pack({**first.packed, "norm": norm.tensors["weight"]})
    return Entry(kernel.run, packed, site.facts.activation is not None)  # type: ignore[attr-defined]
