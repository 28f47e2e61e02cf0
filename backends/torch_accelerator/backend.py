"""A backend made of a `Vendor`: finds, describes and opens its devices; a vendor adds its data and its kernels."""

from __future__ import annotations

from collections.abc import Iterable

from pagoda.backends.torch_accelerator.vendor import Vendor, described
from pagoda.hal.device import Device
from pagoda.hal.errors import DeviceError
from pagoda.hal.info import CONTRACT_VERSION, DeviceInfo, Probe
from pagoda.hal.kernel import Kernel


class VendorBackend:
    """Every device of one vendor that torch shows; a subclass sets `vendor` and `name`."""

    name: str
    vendor: Vendor
    contract = CONTRACT_VERSION

    def probe(self) -> Probe:
        return self.vendor.probe()

    def devices(self) -> tuple[DeviceInfo, ...]:
        if not self.probe().available:
            return ()
        from pagoda.backends.torch_accelerator.found import device_infos  # starts the driver; a probe must not

        return device_infos(self.vendor)

    def open(self, index: int = 0) -> Device:
        probe = self.probe()
        if not probe.available:
            raise DeviceError(probe.message)
        from pagoda.backends.torch_accelerator.found import open_device  # the only place that imports vendor code

        return open_device(self.vendor, index)

    def describe(self, model: str | None = None) -> DeviceInfo:
        return self.vendor.describe(model)

    def described(self) -> tuple[DeviceInfo, ...]:
        return tuple(self.describe(model) for model in described(self.vendor.folder))

    def kernels(self) -> Iterable[Kernel]:
        return ()
