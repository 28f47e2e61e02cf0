"""Linear attention with a fixed decay per head, on one rank: heads are split. The recurrence is that of Mamba 2 with unit steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from pagoda.hal.kv import StatePart
from pagoda.models.blocks.paged import Step
from pagoda.models.blocks.state import GatedNormBlock, StateMixer
from pagoda.models.builder import Builder
from pagoda.models.parallel.shard import Span
from pagoda.models.recurrent import Lightning
from pagoda.ops.scan import SsdFacts


class LightningBlock(StateMixer):
    """One layer's lightning attention (MiniMax)."""

    def __init__(self, build: Builder, path: str, spec: Lightning, width: int) -> None:
        self.spec = spec
        heads, whole = build.shard.split(len(spec.rates), "heads of the linear attention"), Span.whole(width)
        own, count = heads.times(spec.head_dim), len(heads)
        self._width = len(own)
        self._in = build.linear(path, {"query": own, "key": own, "value": own, "gate": own}, whole, "column")
        self._norm = GatedNormBlock(build, f"{path}.norm", spec.norm, own)
        self._out = build.linear(path, {"out": whole}, own, "row")
        kernel = build.kernel("ssd_scan", SsdFacts(build.numerics.dtype, count, spec.head_dim, count, spec.head_dim))
        if build.loading:
            self._scan: Any = kernel.run
            self._a = -torch.tensor(spec.rates[heads.index], dtype=torch.float32).to(build.torch_device)
        super().__init__(StatePart((count, spec.head_dim, spec.head_dim), "float32"))

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x `[T, width]` → this rank's share of the output `[T, width]`, to be summed over ranks."""
        (state,), batch = self.state(step)
        mixed, gate = self._in(x, step.adapters).tensor_split([3 * self._width], dim=-1)
        q, k, v = F.silu(mixed).unflatten(-1, (3, -1, self.spec.head_dim)).unbind(1)
        y = self._scan(v, None, None, self._a, k, q, None, state, batch)
        return self._out(self._norm(y.flatten(1), gate), step.adapters)
