"""`--device tpu`: Google TPUs through torch-xla; with `PJRT_DEVICE=CPU`, the runtime's own switch, its CPU client stands in for them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pagoda.backends.torch_accelerator.packages import installed
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.backends.tpu.kernels import tpu_kernels
from pagoda.backends.tpu.torch_tpu import newer
from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Feature, Limits, Probe
from pagoda.hal.kernel import Kernel

TPU = Vendor(
    name="tpu",
    title="TPU",
    kind="xla",
    files="/dev/vfio/[0-9]*",
    driver="it needs a Cloud TPU machine",
    package="torch-xla",
    module="torch_xla",
    library="",
    get="pip install torch-xla~=2.9 with torch 2.9, in an environment of its own",
    folder=Path(__file__).parent,
    default_model="v5e",
    companions=(),
    collectives=None,
    triton="",
    score=95,
)

STAND_IN = DeviceInfo(
    vendor="google",
    model="pjrt-cpu",
    arch="pjrt-cpu",
    index=0,
    memory_bytes=1 << 29,
    dtypes=frozenset({"float32", "bfloat16"}),
    features=frozenset({Feature.STATIC_SHAPES, Feature.TRACED}),
    limits=Limits(alignment=64, page_sizes=(16, 64)),
    default_dtype="float32",
)
"""The runtime's CPU client: small, since what fills a TPU's memory at start would fill this machine's."""


class TpuBackend:
    """Every TPU of this machine; one device where the runtime is told to use its CPU client."""

    name = "tpu"
    contract = CONTRACT_VERSION
    vendor = TPU

    def probe(self) -> Probe:
        if not simulated():
            return (newer(self.vendor) or self.vendor).probe()
        trouble, package = self.vendor.broken(), installed(self.vendor.package)
        if trouble or not package.usable:
            return Probe(False, trouble or f"PJRT_DEVICE=CPU asks for the CPU client, but {package.words}; {self.vendor.get}")
        return Probe(True, f"torch-xla {package.version} on PJRT's CPU client, which stands in for a TPU; for tests", score=-100)

    def devices(self) -> tuple[DeviceInfo, ...]:
        if not self.probe().available:
            return ()
        from pagoda.backends.tpu.found import device_infos, newer_infos  # starts the runtime; a probe must not

        vendor = newer(self.vendor)
        if vendor is not None:
            return newer_infos(vendor)
        return device_infos(self)

    def open(self, index: int = 0, chips: int = 1) -> Device:
        probe = self.probe()
        if not probe.available:
            raise DeviceError(probe.message)
        from pagoda.backends.tpu.found import open_device, open_newer, open_spread  # the only place that imports vendor code

        vendor = newer(self.vendor)
        if vendor is None:
            return open_spread(self, index, chips) if chips > 1 else open_device(self, index)
        if chips > 1:
            raise DeviceError(f"{chips} chips in one program were asked for, which torch-xla alone can do: {self.vendor.get}")
        return open_newer(vendor, index)

    def open_spread(self, index: int, chips: int) -> Device:
        """See `Spreads`."""
        return self.open(index, chips)

    def describe(self, model: str | None = None) -> DeviceInfo:
        return STAND_IN if model == STAND_IN.model else self.vendor.describe(model)

    def kernels(self) -> Iterable[Kernel]:
        return tpu_kernels()


def simulated() -> bool:
    """Whether the runtime is told to use its CPU client: its own variable, which it reads itself."""
    return os.environ.get("PJRT_DEVICE", "").upper() == "CPU"
