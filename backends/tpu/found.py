"""The devices that the runtime shows, once torch-xla is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pagoda.backends.torch_accelerator.device import checked_index
from pagoda.backends.tpu.device import TpuDevice
from pagoda.backends.tpu.runtime import Runtime
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import DeviceInfo

if TYPE_CHECKING:
    from pagoda.backends.tpu.backend import TpuBackend


def open_device(backend: TpuBackend, index: int) -> TpuDevice:
    """Start the runtime and open a device. Raises `DeviceError`."""
    runtime = _runtime(backend)
    info = _info(backend, runtime, checked_index(backend.name, index, runtime.count()))
    return TpuDevice(runtime, info)


def device_infos(backend: TpuBackend) -> tuple[DeviceInfo, ...]:
    """Facts of every device; empty on any trouble."""
    try:
        runtime = _runtime(backend)
        return tuple(_info(backend, runtime, index) for index in range(runtime.count()))
    except (DeviceError, RuntimeError, AssertionError):
        return ()


def _runtime(backend: TpuBackend) -> Runtime:
    backend.vendor.import_package()
    return Runtime()


def _info(backend: TpuBackend, runtime: Runtime, index: int) -> DeviceInfo:
    driver = f"torch {torch.__version__}, torch-xla {runtime.version}, PJRT {runtime.kind()}"
    if runtime.kind() == "CPU":
        return replace(backend.describe("pjrt-cpu"), index=index, driver=driver)
    return backend.vendor.matching(runtime.model(), index, runtime.memory(index)[1], driver)
