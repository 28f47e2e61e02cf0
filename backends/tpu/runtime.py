"""What Pagoda asks of torch-xla, in one place; imported by `open` alone, after the package."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from pagoda.backends.tpu.lowerings import lower_what_is_missing
from pagoda.hal.errors import DeviceError


class Runtime:
    """The lazy runtime: operators are recorded, and run when a step is closed or a value is looked at."""

    def __init__(self) -> None:
        self._xla: Any = import_module("torch_xla")
        self._raw: Any = self._xla._XLAC
        self._model: Any = import_module("torch_xla.core.xla_model")
        self._world: Any = import_module("torch_xla.runtime")
        self._metrics: Any = import_module("torch_xla.debug.metrics")
        self.version = str(self._xla.__version__)
        lower_what_is_missing()

    def kind(self) -> str:
        """The client: "TPU", or "CPU" where it stands in for one."""
        return str(self._world.device_type())

    def spread(self) -> bool:
        """Whether each program of this process runs on all chips."""
        return bool(self._world.is_spmd())

    def count(self) -> int:
        return int(self._world.addressable_device_count())

    def model(self) -> str:
        """The kind of TPU, as the data file names it."""
        tpu: Any = import_module("torch_xla._internal.tpu")
        return f"v{tpu.version()}"

    def device(self, index: int) -> torch.device:
        device: torch.device = self._xla.device(index)
        return device

    def memory(self, index: int) -> tuple[int, int]:
        """Bytes in use and in all, as the client counts them. Raises `DeviceError` where it does not."""
        try:
            found = self._model.get_memory_info(self.device(index))
        except RuntimeError as error:
            raise DeviceError(f"the {self.kind()} client tells no memory sizes: {error}") from error
        return int(found["bytes_used"]), int(found["bytes_limit"])

    def run(self, *, wait: bool = False) -> None:
        """Close the step: what was recorded is compiled, unless it was before, and started."""
        self._xla.sync(wait=wait)

    def materialise(self, tensors: list[torch.Tensor]) -> None:
        """Run what these tensors need, so that each has bytes of its own; waits for them."""
        self._raw._xla_sync_multi(tensors, devices=[], wait=True, sync_xla_data=True)

    def wait(self) -> None:
        self._model.wait_device_ops()

    def compilations(self) -> int:
        """Programs that were compiled since the process began."""
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    def host_trips(self) -> dict[str, int]:
        """Operators that ran on the host for want of a lowering, and how often."""
        names = [name for name in self._metrics.counter_names() if name.startswith("aten::")]
        return {name: int(self._metrics.counter_value(name)) for name in names}
