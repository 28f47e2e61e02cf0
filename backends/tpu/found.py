"""The devices that the runtime shows, once torch-xla is imported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pagoda.backends.torch_accelerator.device import checked_index
from pagoda.backends.torch_accelerator.found import device_infos as newer_infos
from pagoda.backends.torch_accelerator.found import open_device as open_newer
from pagoda.backends.tpu.device import TpuDevice
from pagoda.backends.tpu.runtime import Runtime
from pagoda.backends.tpu.spread import SpreadDevice, SpreadRuntime
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import DeviceInfo

__all__ = ["device_infos", "newer_infos", "open_device", "open_newer", "open_spread"]

if TYPE_CHECKING:
    from pagoda.backends.tpu.backend import TpuBackend


def open_device(backend: TpuBackend, index: int) -> TpuDevice:
    """Start the runtime and open a device. Raises `DeviceError`."""
    runtime = _runtime(backend)
    if runtime.spread():
        raise DeviceError(f"{backend.name} device {index} was asked for in a process whose chips are one device: take a process of its own")
    info = _info(backend, runtime, checked_index(backend.name, index, runtime.count()))
    return TpuDevice(runtime, info)


def open_spread(backend: TpuBackend, index: int, chips: int) -> SpreadDevice:
    """Start the runtime for one program over `chips` chips. Raises `DeviceError` where there are others than that."""
    runtime = SpreadRuntime(chips, import_package=backend.vendor.import_package)
    if index:
        raise DeviceError(f"device {index} was asked for with {chips} chips: chips of one program are counted from 0; leave the number out")
    one = _info(backend, runtime, 0)
    return SpreadDevice(runtime, replace(one, memory_bytes=one.memory_bytes * chips))


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
        driver = f"{driver} client: verified by simulation of the device, not on a TPU"
        return replace(backend.describe("pjrt-cpu"), index=index, driver=driver)
    return backend.vendor.matching(runtime.model(), index, runtime.memory(index)[1], driver)
