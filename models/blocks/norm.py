"""A norm as a resolved kernel; `add` joins it with the residual addition before it, in one kernel where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pagoda.hal.comm import Communicator, joined_sums
from pagoda.hal.kernel import KernelRun
from pagoda.models.spec import Norm


class NormBlock:
    """Normalises the last dimension."""

    __slots__ = ("_fused", "_fused_packed", "_packed", "_rms", "_run", "tensors")

    def __init__(self, kernel: KernelRun, fused: KernelRun | None, tensors: Mapping[str, torch.Tensor], spec: Norm) -> None:
        self._run, self._rms = kernel.run, (spec.eps, spec.offset) if spec.kind == "rms" else None
        self.tensors = tensors
        self._packed = kernel.pack(tensors)
        self._fused = fused.run if fused is not None else None
        self._fused_packed: Any = fused.pack(tensors) if fused is not None else None

    @classmethod
    def hollow(cls) -> NormBlock:
        """A block that was only listed, not loaded."""
        return cls.__new__(cls)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(self._packed, x)

    def add(self, x: torch.Tensor, residual: torch.Tensor, ranks: Communicator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), where x is summed over `ranks` first; `residual` may be overwritten."""
        if ranks is not None:
            sums = joined_sums(ranks) if self._rms and self._fused else None
            if sums is not None and (joined := sums.all_reduce_add_norm(x, residual, self.tensors.get("weight"), *self._rms)):
                return joined
            x = ranks.all_reduce(x)
        if self._fused is not None:
            return self._fused(self._fused_packed, x, residual)
        total = residual + x
        return self._run(self._packed, total), total
