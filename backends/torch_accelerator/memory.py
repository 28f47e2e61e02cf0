"""A device's memory through its torch module: counted by purpose, with the driver's word on what is free; host staging is pinned."""

from __future__ import annotations

import torch
from pagoda.backends.torch_accelerator.api import TorchApi
from pagoda.backends.torch_host.memory import HostMemory


class AcceleratorMemory(HostMemory):
    """Memory of one device.

    Args:
        api: its torch module.
        device: where tensors are made.
        pinned: whether host staging is page-locked, so that copies need not wait.
    """

    def __init__(self, api: TorchApi, device: torch.device, *, pinned: bool = True) -> None:
        super().__init__(api.free_and_total(device)[1], self._spare, device)
        self._api, self._pinned = api, pinned

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def trim(self) -> None:
        self._api.empty_cache()

    def _spare(self) -> int:
        """What the driver has free and what torch's allocator holds unused."""
        return self._api.free_and_total(self._device)[0] + self._api.held_unused(self._device)
