"""Several TPU chips as one device: one program, partitioned by XLA (SPMD). Tensors are seen whole; where they lie is only said."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from pagoda.backends.tpu.device import TpuDevice
from pagoda.backends.tpu.memory import TpuMemory
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.device import Spread
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import DeviceInfo
from pagoda.hal.memory import MemoryKind

T = TypeVar("T")


class SpreadRuntime(Runtime):
    """The runtime in the mode in which each program runs on all chips; it cannot be left again.

    Args:
        chips: that are asked for; all of those that the runtime sees, since a program takes no fewer.
        import_package: imports torch-xla, naming what is wrong with it.
    """

    def __init__(self, chips: int, import_package: Callable[[], None]) -> None:
        import_package()
        world: Any = import_module("torch_xla.runtime")
        if import_module("torch_xla")._XLAC._xla_get_spmd_config_is_locked() and not world.is_spmd():
            # Devices have their meaning by now: what the host sends would lie on one chip, and a program over all that gets it crashes.
            raise DeviceError(f"{chips} chips in one program were asked for in a process that has opened one: take a process of its own")
        world.use_spmd()  # before anything else is asked of it
        super().__init__()
        self.chips = int(self._world.global_runtime_device_count())
        if self.chips != chips:
            more = "CPU_NUM_DEVICES says how many the CPU client has" if self.kind() == "CPU" else "TPU_VISIBLE_CHIPS says which are seen"
            raise DeviceError(f"{chips} chips were asked for and the runtime sees {self.chips}: a program takes all of them; {more}")
        self._spmd: Any = import_module("torch_xla.distributed.spmd")
        self._mesh = self._spmd.Mesh(np.arange(chips), (chips,), ("chips",))

    def memory(self, index: int) -> tuple[int, int]:
        used, limit = super().memory(index)
        return used * self.chips, limit * self.chips

    def lay(self, tensor: torch.Tensor, dim: int | None) -> None:
        """See `Spread`."""
        axes: list[str | None] = [None] * tensor.dim()
        if dim is not None and dim < tensor.dim() and tensor.shape[dim] >= self.chips:
            axes[dim] = "chips"
        self.materialise([tensor])  # what is not computed yet would be laid out as its program likes
        self._spmd.mark_sharding(tensor, self._mesh, tuple(axes))


class SpreadMemory(TpuMemory):
    """Memory of all chips together. Pages are parted by their numbers, so that any count of heads will do."""

    def __init__(self, runtime: SpreadRuntime, info: DeviceInfo, device: torch.device) -> None:
        super().__init__(runtime, info, device)
        self._lay = runtime.lay

    def alloc(self, kind: MemoryKind, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = super().alloc(kind, shape, dtype)
        if kind is MemoryKind.KV:
            self._lay(tensor, 0)
        return tensor


class SpreadDevice(TpuDevice):
    """All chips of the runtime."""

    def __init__(self, runtime: SpreadRuntime, info: DeviceInfo) -> None:
        super().__init__(runtime, info)
        self.memory = SpreadMemory(runtime, info, self.torch_device)

    def extension(self, protocol: type[T]) -> T | None:
        return self.runtime if protocol is Spread else super().extension(protocol)  # type: ignore[return-value]
