"""The oracle: the portable references on CPU torch in float32 or float64, and no kernel besides."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.backends.torch_host import machine
from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel


class ReferenceBackend:
    """`--device reference`: slow and right."""

    name = "reference"
    contract = CONTRACT_VERSION

    def probe(self) -> Probe:
        return Probe(True, "portable references on CPU torch, float32 and float64; for comparisons, not for serving")

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (self.describe(),)

    def open(self, index: int = 0) -> Device:
        from pagoda.backends.torch_host.device import HostDevice  # here and not above: it brings torch, a probe must stay light

        if index != 0:
            raise DeviceError(f"reference device {index} was asked for; there is one, number 0")
        return HostDevice(self.describe(), machine.available_bytes)

    def describe(self, model: str | None = None) -> DeviceInfo:
        if model not in (None, "reference"):
            raise DeviceError(f"no reference model {model!r} is known; give no model")
        return DeviceInfo(
            vendor="pagoda",
            model="reference",
            arch="reference",
            index=0,
            memory_bytes=machine.memory_bytes(),
            dtypes=frozenset({"float64", "float32"}),
            features=frozenset({Feature.FLOAT64, Feature.UNIFIED_MEMORY, Feature.IN_CALLS}),
            limits=Limits(max_threads=machine.cores(), alignment=64, page_sizes=(16, 32, 64, 128)),
        )

    def kernels(self) -> Iterable[Kernel]:
        return ()
