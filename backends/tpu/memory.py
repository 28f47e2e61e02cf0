"""A TPU's memory: counted by purpose; what is handed out has bytes from the start, and gives them back asleep."""

from __future__ import annotations

import weakref

import torch
from pagoda.backends.torch_host import machine
from pagoda.backends.torch_host.memory import HostMemory
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.info import DeviceInfo
from pagoda.hal.memory import MemoryKind

AT_ONCE = 1 << 20
"""Bytes from which on an allocation is made when it is asked for: smaller ones come with the step that first uses them."""


class TpuMemory(HostMemory):
    """Memory of one device.

    Args:
        runtime: whose client counts what is in use, where it counts.
        info: of the device. device: where tensors are made.
    """

    def __init__(self, runtime: Runtime, info: DeviceInfo, device: torch.device) -> None:
        super().__init__(info.memory_bytes, self._spare, device)
        self._runtime, self._index = runtime, info.index
        self._tensors: list[tuple[MemoryKind, weakref.ref[torch.Tensor]]] = []

    def alloc(self, kind: MemoryKind, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().alloc(kind, shape, dtype)
        if tensor.nbytes >= AT_ONCE:
            try:
                self._runtime.materialise([tensor])
            except RuntimeError as error:
                nbytes = tensor.nbytes
                del tensor
                raise self._exhausted(kind, nbytes, self._free()) from error
        self._tensors = [(each, held) for each, held in self._tensors if held() is not None]
        self._tensors.append((kind, weakref.ref(tensor)))
        return tensor

    def trim(self) -> None:
        self._runtime.wait()

    def release(self, kind: MemoryKind) -> None:
        """Tensors become zeros that nobody has computed yet: the buffers behind them go at once."""
        for held, _ in self._of(kind):
            if not held.released:
                held.released = True
                self._add(kind, -held.nbytes)
        for each, alive in self._tensors:
            tensor = alive()
            if each is kind and tensor is not None:
                tensor.zero_()

    def restore(self, kind: MemoryKind) -> bool:
        asleep = [held for held, _ in self._of(kind) if held.released]
        nbytes, free = sum(held.nbytes for held in asleep), self._free()
        if nbytes > free:
            raise self._exhausted(kind, nbytes, free)
        for held in asleep:
            held.released = False
            self._add(kind, held.nbytes)
        tensors = [alive() for each, alive in self._tensors if each is kind]
        self._runtime.materialise([tensor for tensor in tensors if tensor is not None])
        return True  # a replay finds tensors by what they are, not by where they lie

    def _spare(self) -> int:
        if self._runtime.kind() == "CPU":
            return machine.available_bytes()
        used, limit = self._runtime.memory(self._index)
        return limit - used
