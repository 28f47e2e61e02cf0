"""`--device gaudi`: Intel Gaudi accelerators through habana-torch-plugin."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pagoda.backends.gaudi.kernels import gaudi_kernels
from pagoda.backends.torch_accelerator.backend import VendorBackend
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.kernel import Kernel

GAUDI = Vendor(
    name="gaudi",
    title="Gaudi accelerator",
    kind="hpu",
    files="/dev/accel/accel[0-9]*",
    driver="install the habanalabs driver, or run the container with the habana runtime",
    package="habana-torch-plugin",
    module="habana_frameworks.torch.core",
    library="",
    get="it comes with Intel's Gaudi software: use its container image or habanalabs-installer.sh",
    folder=Path(__file__).parent,
    default_model="gaudi3",
    companions=(),
    collectives="hccl",
    triton="",
    score=90,
)


class GaudiBackend(VendorBackend):
    """Every Gaudi accelerator that torch shows."""

    name = "gaudi"
    vendor = GAUDI

    def kernels(self) -> Iterable[Kernel]:
        return gaudi_kernels()
