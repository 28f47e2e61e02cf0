"""A rank of a pooling model: steps of prompts alone, pooled instead of sampled."""

from __future__ import annotations

from typing import Any

import torch
from pagoda.serving.engine.plan import StepPlan
from pagoda.serving.engine.pooling_step import Collector, PooledPending
from pagoda.serving.engine.runner import Runner


class PoolingRunner(Runner):
    """See `Runner`; its model has a pooler. Steps run as they are: no two have the same shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pooler = self._forward.model.facts.pooler
        assert pooler is not None
        self._collector = Collector(pooler)

    def warm_up(self) -> None:
        """Nothing is captured, so nothing has to be made before the first request."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PooledPending:  # type: ignore[override]
        """Start a step; its vectors or scores are there when `wait` of the answer returns."""
        with self._stream:
            self._prepare(plan)
            for admission in plan.admissions:
                self._collector.admit(admission)
            batch = self._packer.pack(plan)
            groups, model = batch.groups(), self._forward.model
            chosen, answers = self._collector.take(plan, self._forward.hidden(batch, groups, model.plan(groups)))
            pooled = model.pool(chosen)
            host = self.device.memory.host(tuple(pooled.shape), torch.float32)
            host.copy_(pooled, non_blocking=True)
            return PooledPending(plan, host, answers, self._collector.pooler, self._stream.record())
