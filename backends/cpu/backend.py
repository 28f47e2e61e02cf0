"""The CPU backend: this machine's processors as one device."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.backends.cpu.kernels import cpu_kernels
from pagoda.backends.torch_accelerator.packages import autoload_trouble
from pagoda.backends.torch_host import machine
from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel
from pagoda.ops.native.library import available


class CpuBackend:
    """`--device cpu`: always here, sized by affinity and control groups."""

    name = "cpu"
    contract = CONTRACT_VERSION

    def probe(self) -> Probe:
        broken = autoload_trouble()
        if broken:
            return Probe(False, broken)
        info = self.describe()
        size = info.memory_bytes / 2**30
        trouble = available()
        slow = f"; {trouble}: references run instead, many times slower" if trouble else ""
        return Probe(True, f"{info.model} ({info.arch}), {info.limits.max_threads} cores, {size:.1f} GiB{slow}", score=10)

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (self.describe(),)

    def open(self, index: int = 0) -> Device:
        import torch  # here and not above: a probe must stay light
        from pagoda.backends.cpu.device import open_device

        if index != 0:
            raise DeviceError(f"cpu device {index} was asked for; there is one, number 0")
        info = self.describe()
        if torch.get_num_threads() > info.limits.max_threads:
            torch.set_num_threads(info.limits.max_threads)  # torch does not see the quota of a control group
        return open_device(info)

    def describe(self, model: str | None = None) -> DeviceInfo:
        if model not in (None, "cpu"):
            raise DeviceError(f"no CPU model {model!r} is known; only this machine's own (give no model)")
        vendor, name = machine.processor()
        arch = machine.architecture()
        features = {Feature.FLOAT64, Feature.UNIFIED_MEMORY, Feature.IN_CALLS}
        if arch in machine.INT8_ARCHS:
            features.add(Feature.INT8)
        if available() is None:
            features.add(Feature.GRAPHS)
        return DeviceInfo(
            vendor=vendor,
            model=name,
            arch=arch,
            index=0,
            memory_bytes=machine.memory_bytes(),
            dtypes=frozenset({"float64", "float32", "bfloat16", "float16"}),
            features=frozenset(features),
            limits=Limits(max_threads=machine.cores(), alignment=64, page_sizes=(16, 32, 64, 128)),
            default_dtype="float32",  # as wide as the integer products are exact; activations are small beside the weights
        )

    def kernels(self) -> Iterable[Kernel]:
        return cpu_kernels()
