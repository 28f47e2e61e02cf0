"""`--device tpu`: Google TPUs: described and probed for; opened by no code yet, since torch-xla ends at torch 2.9."""

from __future__ import annotations

from pathlib import Path

from pagoda.backends.torch_accelerator.backend import VendorBackend
from pagoda.backends.torch_accelerator.vendor import Vendor
from pagoda.hal.info import Probe

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
    score=0,
)


class TpuBackend(VendorBackend):
    """Every TPU that torch shows."""

    name = "tpu"
    vendor = TPU

    def probe(self) -> Probe:
        found = self.vendor.probe()
        return Probe(False, f"{found.message}; Pagoda plans for TPUs and does not run on them yet") if found.available else found
