"""NCCL's collectives, but that small sums between GPUs which reach each other's memory are one kernel (`ops/triton/one_shot.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pagoda.backends.cuda.peer_memory import open_region
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_accelerator.comm import DeviceCommunicator
from pagoda.hal.comm import ReduceOp, Topology

if TYPE_CHECKING:
    from pagoda.ops.triton.one_shot import Region


class CudaCommunicator(DeviceCommunicator):
    """A group of GPUs, one process each."""

    def __init__(self, topology: Topology, api: TorchApi, device: torch.device, backend: str = "nccl") -> None:
        self._region: Region | None = None
        super().__init__(topology, api, device, backend)
        if topology.direct:
            self._region = open_region(self._store, topology, device)

    def all_reduce(self, x: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        if self._region is None or op != "sum" or not self._region.fits(x):
            return super().all_reduce(x, op)
        self._check()
        return self._region.all_reduce(x)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._region is None or not self._region.fits_rows(x) or not residual.is_contiguous():
            return None
        self._check()
        return self._region.all_reduce_add_norm(x, residual, weight, eps, offset)

    def close(self) -> None:
        super().close()
        self._region = None

    def _lose(self, why: str) -> None:
        super()._lose(why)
        if self._region is not None:
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                self._region.release()
