"""The xIELU activation: plain arithmetic over four numbers that each layer's weights hold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span


class XieluBlock:
    """Every rank holds the numbers; hidden numbers are independent, so it runs on any part of them."""

    def __init__(self, build: Builder, path: str) -> None:
        one = (Span.whole(1),)
        self._positive, self._negative = (build.tensor(f"{path}.{name}", one, "replicated", "float32") for name in ("alpha_p", "alpha_n"))
        self._beta, self._eps = (build.tensor(f"{path}.{name}", (), "replicated", "float32") for name in ("beta", "eps"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._positive is not None and self._negative is not None and self._beta is not None and self._eps is not None
        wide = x.float()
        above = F.softplus(self._positive) * wide * wide
        below = (self._beta + F.softplus(self._negative)) * (torch.expm1(torch.minimum(wide, self._eps)) - wide)
        return (torch.where(wide > 0, above, below) + self._beta * wide).to(x.dtype)
