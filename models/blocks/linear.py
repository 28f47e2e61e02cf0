"""Linear layers and embeddings as resolved kernels with their packed weights."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.hal.kernel import Facts, KernelRun


class Linear:
    """One product, or several whose outputs lie side by side (parts stored in different formats)."""

    __slots__ = ("_more", "_run", "packed", "plain")

    def __init__(self, pieces: list[tuple[KernelRun, Any]], plain: Facts | None = None) -> None:
        """`plain`: facts of the one product, where `packed` holds its weights as they were loaded, by name."""
        kernel, self.packed = pieces[0]
        self.plain = plain
        self._run = kernel.run if kernel is not None else None
        self._more = pieces[1:]

    def __call__(self, x: torch.Tensor, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """x `[T, in]` → `[T, out]`. Knows no adapters: where there may be some, an `AdaptedLinear` stands around it."""
        first = self._run(self.packed, x)
        if not self._more:
            return first
        return torch.cat([first, *(kernel.run(packed, x) for kernel, packed in self._more)], dim=-1)


class Embedding:
    """Rows of a table by id; ids that other ranks hold give zeros."""

    __slots__ = ("_packed", "_run")

    def __init__(self, kernel: KernelRun, packed: Any) -> None:
        self._run = kernel.run if kernel is not None else None
        self._packed = packed

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids `[T]` → `[T, width]`."""
        return self._run(self._packed, ids)
