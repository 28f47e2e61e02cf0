"""Tokens' rows and the states that come with them, each normed, made one by a product."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.spec import Norm


class JoinBlock:
    """The same on every rank."""

    def __init__(self, build: Builder, path: str, norm: Norm, width: int) -> None:
        self._rows: Any = build.norm(f"{path}.row_norm", norm, width)
        self._states: Any = build.norm(f"{path}.state_norm", norm, width)
        self._product: Any = build.linear(path, {"join": Span.whole(width)}, Span.whole(2 * width), "replicated")

    def __call__(self, rows: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        """rows and states `[T, width]` → `[T, width]`."""
        assert states is not None
        result: torch.Tensor = self._product(torch.cat([self._rows(rows), self._states(states)], dim=-1))
        return result
